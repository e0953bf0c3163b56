"""Architecture ``maincoder``: Maincoder 1B.

Queries and keys are normed per head after the rotary embedding. The weights of these norms lie as
the rows of Q and K do, rotated pairs as neighbours.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="maincoder",
        qk_row_order="interleaved",
        qk_norm="head",
        qk_norm_after_rope=True,
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *(replace(rule, rotated=True) for rule in blocks.HEAD_NORMS),
            *blocks.FEED_FORWARD,
        ),
    )
)
