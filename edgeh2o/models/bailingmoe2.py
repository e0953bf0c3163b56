"""Architecture ``bailingmoe2``: Ling 2.0 and Ring 2.0 (mini, flash), mixtures of experts.

Experts are chosen as in ``deepseek2``, in groups and with biases; Q, K and V are one matrix, whose
heads are normed and rotated in part. Files may have a layer that guesses tokens ahead (MTP).
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

register_architecture(
    ArchitectureSpec(
        name="bailingmoe2",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        experts=ExpertRule(
            shared="counted",
            gate="file",
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
        ),
        has_drafting_layers=True,
        can_draft=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.HEAD_NORMS,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.CHOICE_BIASES)),
        ),
    )
)
