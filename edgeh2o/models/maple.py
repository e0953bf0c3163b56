"""Architecture ``maple``: a mixture of experts (20B) with windows and limits of gates.

Queries and keys are normed per head; files say which layers have a window, and the others have no
positions. Of experts what goes into the activation, and what it multiplies, has a limit.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="maple",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        rope=RopeRule(only_windows=True),
        windows=SlidingWindows(is_required=True),
        experts=ExpertRule(has_gate_limits=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.EXPERTS,
        ),
    )
)
