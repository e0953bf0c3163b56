"""Architectures ``stablelm``, ``starcoder2`` and ``orion``: models with LayerNorm.

``stablelm`` is a llama with it, whose heads are rotated in part, ``orion`` one with biases of all
norms; networks of ``starcoder2`` have no gate, but a GELU. StableLM 2 12B, whose networks are
beside attention, is refused: its layers have one norm.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="stablelm",
        qk_row_order="half_split",
        norm="layer",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.NORM_BIASES,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="starcoder2",
        qk_row_order="half_split",
        norm="layer",
        activation="ungated_gelu",
        windows=SlidingWindows(),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.NORM_BIASES,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.ATTENTION_OUTPUT_BIAS,
            *blocks.UNGATED_FEED_FORWARD,
            *blocks.UNGATED_FEED_FORWARD_BIASES,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="orion",
        qk_row_order="half_split",
        norm="layer",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.required(blocks.NORM_BIASES),
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
