"""Architectures ``gpt2`` and ``starcoder``: positions are rows of a table, added to embeddings.

LayerNorm and biases everywhere, Q, K and V one matrix or three, networks with a GELU and no gate.
StarCoder and SantaCoder have one KV head. A context is no longer than the table.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_TENSORS = (
    *blocks.EMBEDDINGS,
    tensor("position_embd.weight", "model_dim", "n_positions"),
    *blocks.PRE_NORMS,
    *blocks.required(blocks.NORM_BIASES),
    *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
    *blocks.UNGATED_FEED_FORWARD,
    *blocks.required(blocks.UNGATED_FEED_FORWARD_BIASES),
)

for _name in ("gpt2", "starcoder"):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            norm="layer",
            activation="ungated_gelu",
            rope=RopeRule(none_every=1),
            has_position_table=True,
            tensors=(*_TENSORS, *blocks.ATTENTION, *blocks.required(blocks.QKV_BIASES)),
            fused_tensors=(*_TENSORS, *blocks.FUSED_ATTENTION, *blocks.FUSED_BIAS),
        )
    )
