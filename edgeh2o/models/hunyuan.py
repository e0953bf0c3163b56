"""Architecture ``hunyuan-dense``: Hunyuan 0.5B to 7B.

Queries and keys are normed per head after the rotary embedding.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="hunyuan-dense",
        qk_row_order="half_split",
        qk_norm="head",
        qk_norm_after_rope=True,
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
