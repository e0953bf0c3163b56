"""Architecture ``internlm2``: InternLM 2 and 2.5, a llama by another name."""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="internlm2",
        qk_row_order="interleaved",
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
