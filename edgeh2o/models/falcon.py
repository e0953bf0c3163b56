"""Architecture ``falcon``: Falcon 1 and 2, with attention and networks side by side.

Both have the input of the layer, behind LayerNorm: one for both, or in the larger models one each,
where ``attn_norm`` is the network's. Networks have a GELU and no gate.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_NORMS = tuple(
    rule
    for part in ("weight", "bias")
    for rule in (
        tensor(
            f"blk.{{layer}}.attn_norm.{part}",
            "model_dim",
            core_name=f"blk.{{layer}}.ffn_norm.{part}",
        ),
        tensor(
            f"blk.{{layer}}.attn_norm_2.{part}",
            "model_dim",
            core_name=f"blk.{{layer}}.attn_norm.{part}",
            stand_in=f"blk.{{layer}}.attn_norm.{part}",
        ),
    )
)

register_architecture(
    ArchitectureSpec(
        name="falcon",
        qk_row_order="half_split",
        norm="layer",
        is_parallel=True,
        has_parallel_norm=True,
        activation="ungated_gelu",
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("output_norm.bias", "model_dim"),
            *_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.UNGATED_FEED_FORWARD,
        ),
    )
)
