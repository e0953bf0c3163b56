"""Architecture ``gemma3n``: Gemma 3n, for texts.

Every token has four residual streams (AltUp): layers compute the first, which they predict, and
correct the others by it. Beside attention is a branch of low rank (LAuReL), and the gates of the
first layers are cut off. As in Gemma 4, layers have an input per token, and the last ones read the
keys and values of others.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .streams import StreamRule
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="gemma3n",
        qk_row_order="half_split",
        norm_placement="both",
        qk_norm="head",
        norms_values=True,
        activation="gelu_tanh",
        windows=SlidingWindows(is_required=True, rope_base=10000.0, has_plain_rope=True),
        attention_scale=1.0,
        scales={"logit_soft_cap": "final_logit_softcapping"},
        default_soft_caps={"logit_soft_cap": 30.0},
        scales_embedding_by_width=True,
        shares_kv=True,
        has_token_inputs=True,
        # 1.645 standard deviations are 95% of a normal distribution.
        streams=StreamRule(laurel_rank=64, default_cutoff=1.6448533535003662, n_cut_layers=10),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
            tensor("blk.{layer}.attn_k.weight", "model_dim", "kv_dim", rotated=True, of_kv=True),
            tensor("blk.{layer}.attn_v.weight", "model_dim", "kv_dim", of_kv=True),
            *blocks.ATTENTION_OUTPUT,
            tensor("blk.{layer}.attn_q_norm.weight", "head_dim"),
            tensor("blk.{layer}.attn_k_norm.weight", "head_dim", of_kv=True),
            *blocks.FEED_FORWARD,
            *blocks.required(blocks.TOKEN_INPUTS),
            tensor("altup_proj.weight", "model_dim", "model_dim", "n_other_streams"),
            tensor("altup_unembd_proj.weight", "model_dim", "model_dim", "n_other_streams"),
            tensor("blk.{layer}.altup_router.weight", "model_dim", "n_streams"),
            tensor("blk.{layer}.altup_router_norm.weight", "model_dim"),
            tensor(
                "blk.{layer}.altup_predict_coef.weight",
                "n_streams",
                "n_stream_pairs",
                is_vectors=True,
            ),
            tensor(
                "blk.{layer}.altup_correct_coef.weight", "n_streams", "n_streams", is_vectors=True
            ),
            tensor("blk.{layer}.altup_correct_scale.weight", "model_dim"),
            tensor("blk.{layer}.laurel_l.weight", "model_dim", "laurel_rank"),
            tensor("blk.{layer}.laurel_r.weight", "laurel_rank", "model_dim"),
            tensor("blk.{layer}.laurel_post_norm.weight", "model_dim"),
        ),
    )
)
