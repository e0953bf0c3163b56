"""Architecture ``chatglm``: ChatGLM 3, GLM-4 9B (of 2024) and GLM-Edge.

A llama whose gate and up are one matrix; half of every head is rotated. Q, K and V are one matrix
with biases, or three in GLM-Edge.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

_COMMON = (*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.FUSED_FEED_FORWARD)

register_architecture(
    ArchitectureSpec(
        name="chatglm",
        qk_row_order="interleaved",
        activation="silu",
        tensors=(*_COMMON, *blocks.ATTENTION, *blocks.QKV_BIASES),
        fused_tensors=(
            *_COMMON,
            *blocks.FUSED_ATTENTION,
            *blocks.optional(blocks.FUSED_BIAS),
        ),
    )
)
