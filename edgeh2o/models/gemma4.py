"""Architecture ``gemma4``: Gemma 4, for texts.

Layers with a window have smaller heads, and a rotary embedding of their own; the others rotate a
part of their pairs. The last layers read the keys and values of the last of their kind that has
its own. Every layer of the small ones has an input per token, made of a table of its own and of the
embedding. In layers without a window of the large ones values are made by the matrix of the keys.

Every layer of 26B-A4B has experts beside the network that the others have: each of both, and the
router, norms the layer's input by itself, and what comes out is normed before and after it is
added up.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
from .windows import SlidingWindows

_EXPERTS = (
    *(
        tensor(f"blk.{{layer}}.{name}.weight", "model_dim", core_name=f"blk.{{layer}}.{own}.weight")
        for name, own in (
            ("pre_ffw_norm_2", "ffn_expert_norm"),
            ("post_ffw_norm_1", "ffn_shared_post_norm"),
            ("post_ffw_norm_2", "ffn_expert_post_norm"),
        )
    ),
    *(
        tensor(
            f"blk.{{layer}}.ffn_{name}.weight",
            *shape,
            core_name=f"blk.{{layer}}.ffn_{name}_shexp.weight",
        )
        for name, *shape in (
            ("gate", "model_dim", "shared_ffn_dim"),
            ("up", "model_dim", "shared_ffn_dim"),
            ("down", "shared_ffn_dim", "model_dim"),
        )
    ),
    tensor("blk.{layer}.ffn_gate_inp.weight", "model_dim", "n_experts"),
    tensor(
        "blk.{layer}.ffn_gate_inp.scale",
        "model_dim",
        core_name="blk.{layer}.ffn_router_norm.weight",
    ),
    *blocks.FUSED_EXPERTS,
    tensor(
        "blk.{layer}.ffn_down_exps.scale",
        "n_experts",
        required=False,
        core_name="blk.{layer}.ffn_expert_scale",
    ),
)

register_architecture(
    ArchitectureSpec(
        name="gemma4",
        qk_row_order="half_split",
        rope_factors="rope_freqs.weight",
        norm_placement="both",
        qk_norm="head",
        norms_values=True,
        activation="gelu_tanh",
        windows=SlidingWindows(
            is_required=True, has_own_heads=True, rope_base=10000.0, has_plain_rope=True
        ),
        attention_scale=1.0,
        scales={"logit_soft_cap": "final_logit_softcapping"},
        scales_embedding_by_width=True,
        shares_kv=True,
        has_token_inputs=True,
        has_output_scale=True,
        experts=ExpertRule(shared="dense", has_norms=True, is_optional=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
            tensor("blk.{layer}.attn_k.weight", "model_dim", "kv_dim", rotated=True, of_kv=True),
            tensor(
                "blk.{layer}.attn_v.weight",
                "model_dim",
                "kv_dim",
                of_kv=True,
                stand_in="blk.{layer}.attn_k.weight",
            ),
            *blocks.ATTENTION_OUTPUT,
            tensor("blk.{layer}.attn_q_norm.weight", "head_dim"),
            tensor("blk.{layer}.attn_k_norm.weight", "head_dim", of_kv=True),
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", _EXPERTS),
            *blocks.TOKEN_INPUTS,
            tensor("blk.{layer}.layer_output_scale.weight", "one", required=False),
        ),
    )
)
