"""Architecture ``llama``: Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM and their fine-tunes.

Converters store the rows of Q and K in interleaved pair order; Llama 3.1 and later bring their
RoPE scaling as ``rope_freqs.weight``; small models have no ``output.weight`` and tie it to the
embedding. Early Mistral models have a window in every layer. Files with experts have no other
networks.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of
from .windows import SlidingWindows

TENSORS = (
    *blocks.EMBEDDINGS,
    *blocks.PRE_NORMS,
    *blocks.ATTENTION,
    *blocks.QKV_BIASES,
    *blocks.ATTENTION_OUTPUT_BIAS,
    *tensors_of("dense", (*blocks.FEED_FORWARD, *blocks.FEED_FORWARD_BIASES)),
    *tensors_of("experts", blocks.EXPERTS),
)

register_architecture(
    ArchitectureSpec(
        name="llama",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        activation="silu",
        windows=SlidingWindows(),
        experts=ExpertRule(has_own_width=False, is_optional=True),
        tensors=TENSORS,
    )
)
