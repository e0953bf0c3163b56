"""Architecture ``seed_oss``: Seed-OSS, a llama with biases of Q, K and V.

The norm of the feed-forward network's input goes by the name of a norm behind attention.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="seed_oss",
        qk_row_order="half_split",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.RENAMED_PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
        ),
    )
)
