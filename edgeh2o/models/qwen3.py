"""Architectures ``qwen3`` and ``qwen3moe``: Qwen 3, with an RMS norm of every query and key head.

The latter is a mixture of experts, whose weights are normalised over the chosen ones.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

for _name, _feed_forward in (("qwen3", blocks.FEED_FORWARD), ("qwen3moe", blocks.EXPERTS)):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            qk_norm="head",
            activation="silu",
            has_experts=_feed_forward is blocks.EXPERTS,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.HEAD_NORMS,
                *_feed_forward,
            ),
        )
    )
