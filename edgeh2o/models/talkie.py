"""Architecture ``talkie``: Talkie 13B, whose norms have no weights.

Queries and keys are normed per head after the rotary embedding. Heads of queries and the outputs of
attention and network have a factor each, and a multiple of the normed embedding is added behind
every layer.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_EMBEDDING, _, _OUTPUT = blocks.EMBEDDINGS

register_architecture(
    ArchitectureSpec(
        name="talkie",
        qk_row_order="half_split",
        has_norm_weights=False,
        norms_embeddings=True,
        qk_norm="head",
        qk_norm_after_rope=True,
        has_head_gains=True,
        activation="silu",
        scales={"logit_scale": "logit_scale"},
        required_scales=("logit_scale",),
        tensors=(
            _EMBEDDING,
            _OUTPUT,
            *blocks.ATTENTION,
            tensor("blk.{layer}.attn_q_norm.weight", "one", "n_heads", is_vectors=True),
            tensor("blk.{layer}.attn_output.scale", "one", required=False),
            *blocks.FEED_FORWARD,
            tensor("blk.{layer}.ffn_down.scale", "one", required=False),
            tensor(
                "blk.{layer}.layer_output_scale.weight",
                "one",
                core_name="blk.{layer}.embedding_share.weight",
            ),
        ),
    )
)
