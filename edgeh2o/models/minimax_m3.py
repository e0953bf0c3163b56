"""Architecture ``minimax-m3``: MiniMax M3 (428B-A23B), a mixture of experts behind dense layers.

Queries and keys are normed per head and rotated in part. In layers with experts every KV head has a
head of an indexer, which scores tokens; its queries read the blocks of the best ones and the last
blocks (MiniMax sparse attention). Networks have the activation of ``gpt-oss``; experts are chosen
as in ``deepseek2``.
"""

from __future__ import annotations

from . import blocks
from .experts import BIASED_RULE
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="minimax-m3",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu_clamped",
        experts=BIASED_RULE,
        chooses_by_head=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.INDEXER,
            *blocks.BIASED_EXPERTS,
        ),
    )
)
