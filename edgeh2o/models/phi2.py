"""Architecture ``phi2``: Phi 1, 1.5 and 2, with attention and networks side by side.

Both have the same input, behind one LayerNorm. Heads are rotated in part, networks have a GELU and
no gate, and everything has biases. Older files have Q, K and V as one matrix.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_COMMON = (
    *blocks.EMBEDDINGS,
    tensor("output.bias", "vocab_size"),
    tensor("blk.{layer}.attn_norm.weight", "model_dim"),
    *blocks.UNGATED_FEED_FORWARD,
    *blocks.required(blocks.SHARED_NORM_BIASES),
    *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
    *blocks.required(blocks.UNGATED_FEED_FORWARD_BIASES),
)

register_architecture(
    ArchitectureSpec(
        name="phi2",
        qk_row_order="half_split",
        norm="layer",
        is_parallel=True,
        activation="ungated_gelu",
        tensors=(*_COMMON, *blocks.ATTENTION, *blocks.QKV_BIASES),
        fused_tensors=(*_COMMON, *blocks.FUSED_ATTENTION, *blocks.FUSED_BIAS),
    )
)
