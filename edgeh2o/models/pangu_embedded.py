"""Architecture ``pangu-embedded``: openPangu-Embedded 1B and 7B.

A llama with biases of attention.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="pangu-embedded",
        qk_row_order="half_split",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
            *blocks.FEED_FORWARD,
        ),
    )
)
