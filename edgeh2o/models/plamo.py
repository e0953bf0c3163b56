"""Architecture ``plamo``: PLaMo 13B, whose networks have the normed input of attention."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="plamo",
        qk_row_order="half_split",
        is_parallel=True,
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
