"""Architecture ``olmoe``: OLMoE, a mixture of experts whose weights are not normalised."""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="olmoe",
        qk_row_order="half_split",
        qk_norm="projection",
        activation="silu",
        experts=ExpertRule(has_own_width=False, is_normalised=False),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.PROJECTION_NORMS,
            *blocks.EXPERTS,
        ),
    )
)
