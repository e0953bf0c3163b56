"""Architecture ``bailingmoe``: Ling 1 and 1.5 (lite, plus), mixtures of experts.

Shares are a softmax; there is a shared expert, as wide as several. All layers have experts.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="bailingmoe",
        qk_row_order="interleaved",
        activation="silu",
        experts=ExpertRule(shared="count", has_scales=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.EXPERTS,
            *blocks.SHARED_EXPERT,
        ),
    )
)
