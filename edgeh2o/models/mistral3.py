"""Architecture ``mistral3``: Ministral 3, a llama whose queries grow with their position.

Its YaRN scaling comes with a multiplier of the logarithm that takes the factor of queries and keys
away again.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="mistral3",
        qk_row_order="interleaved",
        rope=RopeRule(has_log_multiplier=True, has_temperature=True),
        rope_factors="rope_freqs.weight",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.ATTENTION_OUTPUT_BIAS,
            *blocks.FEED_FORWARD,
            *blocks.FEED_FORWARD_BIASES,
        ),
    )
)
