"""Architecture ``openelm``: OpenELM 270M to 3B.

Layers differ in their numbers of heads and the widths of their networks. Q, K and V are one matrix,
heads are normed, and the embedding is the output too.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="openelm",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        tensors=(
            *(rule for rule in blocks.EMBEDDINGS if rule.required),
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.FEED_FORWARD,
        ),
    )
)
