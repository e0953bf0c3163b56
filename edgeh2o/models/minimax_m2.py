"""Architecture ``minimax-m2``: MiniMax M2, a mixture of experts in every layer.

Queries and keys are normed over the whole projection and rotated in part. Shares of experts are
sigmoids that add up to 1; a bias counts in their choice.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="minimax-m2",
        qk_row_order="half_split",
        qk_norm="projection",
        activation="silu",
        experts=ExpertRule(has_own_width=False, gate="sigmoid", has_bias=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.PROJECTION_NORMS,
            *blocks.EXPERTS,
            *blocks.required(blocks.CHOICE_BIASES),
        ),
    )
)
