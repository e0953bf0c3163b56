"""Architecture ``codeshell``: CodeShell 7B, with LayerNorm and biases everywhere.

Q, K and V may be one matrix. The embedding may be missing: then it is the output matrix.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .spec import ArchitectureSpec, register_architecture

_EMBEDDING, *_REST = blocks.EMBEDDINGS
_TENSORS = (
    replace(_EMBEDDING, stand_in="output.weight"),
    *_REST,
    *blocks.PRE_NORMS,
    *blocks.required(blocks.NORM_BIASES),
    *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
    *blocks.UNGATED_FEED_FORWARD,
    *blocks.required(blocks.UNGATED_FEED_FORWARD_BIASES),
)

register_architecture(
    ArchitectureSpec(
        name="codeshell",
        qk_row_order="half_split",
        norm="layer",
        activation="ungated_gelu",
        tensors=(*_TENSORS, *blocks.ATTENTION, *blocks.QKV_BIASES),
        fused_tensors=(*_TENSORS, *blocks.FUSED_ATTENTION, *blocks.FUSED_BIAS),
    )
)
