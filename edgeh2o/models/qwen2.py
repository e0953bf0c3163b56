"""Architectures ``qwen2``, ``qwen2vl`` and ``qwen2moe``: Qwen 2 and 2.5, with biases of Q, K and V.

The rotary embedding of the VL models (text part) has three axes, which are one for a text. In the
mixture of experts the weights are not normalised, and a shared expert has a gate.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="qwen2",
        qk_row_order="half_split",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="qwen2vl",
        qk_row_order="half_split",
        activation="silu",
        rope=RopeRule(has_sections=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="qwen2moe",
        qk_row_order="half_split",
        activation="silu",
        experts=ExpertRule(is_normalised=False, shared="gated"),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.EXPERTS,
            *blocks.SHARED_EXPERT,
            *blocks.SHARED_EXPERT_GATE,
        ),
    )
)
