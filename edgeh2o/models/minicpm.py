"""Architecture ``minicpm``: MiniCPM 1 and 4, a llama with three scales.

Logits are divided by theirs. Files of early converters lack the keys; what llama.cpp assumes then
multiplies the logits instead, so they are refused.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="minicpm",
        qk_row_order="interleaved",
        long_rope_factors=("rope_factors_short.weight", "rope_factors_long.weight"),
        activation="silu",
        scales={"embedding_scale": "embedding_scale", "residual_scale": "residual_scale"},
        divisors={"logit_scale": "logit_scale"},
        required_scales=("embedding_scale", "residual_scale", "logit_scale"),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
