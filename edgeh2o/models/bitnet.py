"""Architecture ``bitnet``: BitNet b1.58 of 1bitLLM, whose weights have three values.

A llama with norms before the output projection of attention and the down projection of networks.
Older files have a factor of its own beside every matrix. The files of Microsoft's own runtime are
of other architectures.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

register_architecture(
    ArchitectureSpec(
        name="bitnet",
        qk_row_order="half_split",
        activation="silu",
        has_sub_norms=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            tensor("blk.{layer}.attn_sub_norm.weight", "q_dim"),
            tensor("blk.{layer}.ffn_sub_norm.weight", "ffn_dim"),
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
            *(tensor(f"blk.{{layer}}.{name}.scale", "one", required=False) for name in _MATRICES),
        ),
    )
)
