"""Architecture ``phimoe``: Phi-3.5-MoE, computed as llama.cpp does.

A mixture of experts with biases of norms, attention and logits. The original differs where files
cannot say it: its norms are LayerNorm, and the shares of a token's two experts, each a softmax over
the experts that come near it, do not add up to 1.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="phimoe",
        qk_row_order="half_split",
        norm="biased_rms",
        activation="silu",
        long_rope_factors=("rope_factors_short.weight", "rope_factors_long.weight"),
        windows=SlidingWindows(),
        experts=ExpertRule(has_own_width=False),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("output.bias", "vocab_size"),
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.required(blocks.NORM_BIASES),
            *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
            *blocks.EXPERTS,
        ),
    )
)
