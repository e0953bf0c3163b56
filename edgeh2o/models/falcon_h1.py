"""Architecture ``falcon-h1``: attention and Mamba-2 side by side in every layer.

Both have the layer's normed input, and their outputs are added. The multipliers of the model are in
the weights of its files. The norm of Mamba-2 is left out in some, and that of the feed-forward
network goes without the usual end of its name.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .hybrids import HybridRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="falcon-h1",
        qk_row_order="half_split",
        activation="silu",
        hybrid=HybridRule(mixer="attention_mamba2"),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            tensor("blk.{layer}.ffn_norm", "model_dim", core_name="blk.{layer}.ffn_norm.weight"),
            *blocks.MAMBA2,
            replace(blocks.MAMBA2_NORM, required=False),
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FEED_FORWARD,
            *blocks.FEED_FORWARD_BIASES,
        ),
    )
)
