"""Architectures ``qwen3``, ``qwen3moe``, ``qwen3vl``, ``qwen3vlmoe``: Qwen 3 and Qwen3-VL.

Queries and keys are normed per head. The weights of experts are normalised over the chosen ones.
The rotary embedding of the VL models (text part) has three axes, which are one for a text.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .ranking import SOFTMAX_RANKING
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

for _name in ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"):
    _has_experts = _name.endswith("moe")
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            qk_norm="head",
            activation="silu",
            rope=RopeRule(has_sections="vl" in _name),
            experts=ExpertRule() if _has_experts else None,
            ranking=None if _has_experts else SOFTMAX_RANKING,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.HEAD_NORMS,
                *(blocks.EXPERTS if _has_experts else blocks.FEED_FORWARD),
            ),
        )
    )
