"""Architecture ``qwen2``: Qwen 2 and 2.5 and their fine-tunes, with biases of Q, K and V."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="qwen2",
        qk_row_order="half_split",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
        ),
    )
)
