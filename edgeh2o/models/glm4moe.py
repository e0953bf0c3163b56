"""Architecture ``glm4moe``: GLM-4.5, 4.5-Air, 4.6, Solar Open, mixtures of experts.

Half of every head is rotated; GLM-4.5 norms queries and keys per head, Air does not. The norm of
the experts' input goes by the name of a norm behind attention. Layers that guess tokens ahead (MTP)
are left out. Files of the vision models, whose rotary embedding has several axes, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

register_architecture(
    ArchitectureSpec(
        name="glm4moe",
        qk_row_order="half_split",
        qk_norm="head",
        has_optional_qk_norm=True,
        activation="silu",
        experts=ExpertRule(
            shared="count",
            gate="sigmoid",
            says_gate=False,
            has_bias=True,
            has_dense_layers=True,
            has_scales=True,
        ),
        has_drafting_layers=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.RENAMED_PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *(replace(rule, required=False) for rule in blocks.HEAD_NORMS),
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of(
                "experts",
                (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.required(blocks.CHOICE_BIASES)),
            ),
        ),
    )
)
