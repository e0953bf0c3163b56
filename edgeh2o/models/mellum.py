"""Architecture ``mellum``: Mellum 2 (12B-A2.5B), a mixture of experts for code.

Queries and keys are normed per head. Three of four layers have windows; RoPE scaling is for the
fourth only.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="mellum",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(full_every=4, has_plain_rope=True),
        experts=ExpertRule(),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.EXPERTS,
        ),
    )
)
