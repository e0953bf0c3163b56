"""Architecture ``glm4moe``: GLM-4.5, 4.5-Air, 4.6, Solar Open, mixtures of experts.

Half of every head is rotated; GLM-4.5 norms queries and keys per head, Air does not. The norm of
the experts' input goes by the name of a norm behind attention. Files may have a layer that guesses
tokens ahead (MTP). Those of the vision models, whose rotary embedding has several axes, are
refused.
"""

from __future__ import annotations

from . import blocks
from .experts import BIASED_RULE
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="glm4moe",
        qk_row_order="half_split",
        qk_norm="head",
        has_optional_qk_norm=True,
        activation="silu",
        experts=BIASED_RULE,
        has_drafting_layers=True,
        can_draft=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.RENAMED_PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.optional(blocks.HEAD_NORMS),
            *blocks.BIASED_EXPERTS,
        ),
    )
)
