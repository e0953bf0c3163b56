"""Architectures ``hunyuan-dense`` (Hunyuan 0.5B to 7B) and ``hunyuan-moe`` (Hunyuan A13B).

Queries and keys are normed per head after the rotary embedding. The mixture of experts has a shared
one.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture

for _name, _experts, _feed_forward in (
    ("hunyuan-dense", None, blocks.FEED_FORWARD),
    (
        "hunyuan-moe",
        ExpertRule(shared="required"),
        (*blocks.EXPERTS, *blocks.required(blocks.SHARED_EXPERT)),
    ),
):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            qk_norm="head",
            qk_norm_after_rope=True,
            activation="silu",
            experts=_experts,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.HEAD_NORMS,
                *_feed_forward,
            ),
        )
    )
