"""Architecture ``qwen3``: dense Qwen 3 models, with an RMS norm of every query and key head."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="qwen3",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.FEED_FORWARD,
        ),
    )
)
