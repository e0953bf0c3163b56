"""Architecture ``refact``: Refact 1.6B, a llama with a bias by distance (ALiBi) and one KV head."""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="refact",
        qk_row_order="half_split",
        activation="silu",
        rope=RopeRule(none_every=1),
        max_alibi_bias=8.0,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
