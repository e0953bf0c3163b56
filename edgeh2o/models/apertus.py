"""Architecture ``apertus``: a llama with norms of heads, whose networks have xIELU and no gate."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="apertus",
        qk_row_order="half_split",
        qk_norm="head",
        rope_factors="rope_freqs.weight",
        activation="xielu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.ATTENTION_OUTPUT_BIAS,
            *blocks.HEAD_NORMS,
            *blocks.UNGATED_FEED_FORWARD,
        ),
    )
)
