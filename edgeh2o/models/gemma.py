"""Architecture ``gemma``: Gemma 1. Converters have added the 1 of its norm weights."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="gemma",
        qk_row_order="half_split",
        activation="gelu_tanh",
        scales_embedding_by_width=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
