"""Architecture ``mpt``: MPT 7B and 30B and others of MosaicML's kind.

LayerNorm, with biases in some models, and networks with a GELU and no gate. Files say how steep the
bias by distance (ALiBi) is; where it is 0, positions are rows of a table. Queries, keys and values
may have a limit, and queries and keys a norm.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="mpt",
        qk_row_order="half_split",
        norm="layer",
        activation="ungated_gelu",
        rope=RopeRule(none_every=1),
        alibi_key="optional",
        has_position_table="optional",
        qk_norm="layer",
        has_optional_qk_norm=True,
        scales={"qkv_limit": "attention.clamp_kqv"},
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("position_embd.weight", "model_dim", "n_positions", required=False),
            *blocks.PRE_NORMS,
            *blocks.NORM_BIASES,
            *blocks.optional(blocks.LAYER_QK_NORMS),
            *blocks.FUSED_ATTENTION,
            *blocks.optional(blocks.FUSED_BIAS),
            *blocks.ATTENTION_OUTPUT_BIAS,
            *blocks.UNGATED_FEED_FORWARD,
            *blocks.UNGATED_FEED_FORWARD_BIASES,
        ),
    )
)
