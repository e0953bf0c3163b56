"""Groups of tensors that most families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .tensors import TensorPart, TensorRule, tensor, tensors_of


def required(rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The same tensors for files that must have them all."""
    return tuple(replace(rule, required=True) for rule in rules)


def optional(rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The same tensors for files that may lack them."""
    return tuple(replace(rule, required=False) for rule in rules)


EMBEDDINGS = (
    tensor("token_embd.weight", "model_dim", "vocab_size"),
    tensor("output_norm.weight", "model_dim"),
    tensor("output.weight", "model_dim", "vocab_size", required=False),
)
PRE_NORMS = (
    tensor("blk.{layer}.attn_norm.weight", "model_dim"),
    tensor("blk.{layer}.ffn_norm.weight", "model_dim"),
)
# The norm of the network's input goes by the name of a norm behind attention.
RENAMED_PRE_NORMS = (
    tensor("blk.{layer}.attn_norm.weight", "model_dim"),
    tensor(
        "blk.{layer}.post_attention_norm.weight",
        "model_dim",
        core_name="blk.{layer}.ffn_norm.weight",
    ),
)
POST_NORMS = (
    tensor("blk.{layer}.post_attention_norm.weight", "model_dim"),
    tensor("blk.{layer}.post_ffw_norm.weight", "model_dim"),
)
HEAD_NORMS = (
    tensor("blk.{layer}.attn_q_norm.weight", "head_dim"),
    tensor("blk.{layer}.attn_k_norm.weight", "head_dim"),
)
PROJECTION_NORMS = (
    tensor("blk.{layer}.attn_q_norm.weight", "q_dim"),
    tensor("blk.{layer}.attn_k_norm.weight", "kv_dim"),
)
# LayerNorm of whole projections.
LAYER_QK_NORMS = (
    *PROJECTION_NORMS,
    tensor("blk.{layer}.attn_q_norm.bias", "q_dim"),
    tensor("blk.{layer}.attn_k_norm.bias", "kv_dim"),
)
ATTENTION_OUTPUT = (tensor("blk.{layer}.attn_output.weight", "out_dim", "model_dim"),)
# Of LayerNorm.
NORM_BIASES = tuple(
    tensor(f"{name}.bias", "model_dim", required=False)
    for name in ("output_norm", "blk.{layer}.attn_norm", "blk.{layer}.ffn_norm")
)
# Where the network has the normed input of attention.
SHARED_NORM_BIASES = tuple(rule for rule in NORM_BIASES if "ffn_norm" not in rule.name)
ATTENTION = (
    tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
    tensor("blk.{layer}.attn_k.weight", "model_dim", "kv_dim", rotated=True),
    tensor("blk.{layer}.attn_v.weight", "model_dim", "v_dim"),
    *ATTENTION_OUTPUT,
)
FUSED_ATTENTION = (
    tensor(
        "blk.{layer}.attn_qkv.weight",
        "model_dim",
        "qkv_dim",
        parts=(
            TensorPart("blk.{layer}.attn_q.weight", "q_dim", rotated=True),
            TensorPart("blk.{layer}.attn_k.weight", "kv_dim", rotated=True),
            TensorPart("blk.{layer}.attn_v.weight", "v_dim"),
        ),
    ),
    *ATTENTION_OUTPUT,
)
QKV_BIASES = (
    tensor("blk.{layer}.attn_q.bias", "q_dim", rotated=True, required=False),
    tensor("blk.{layer}.attn_k.bias", "kv_dim", rotated=True, required=False),
    tensor("blk.{layer}.attn_v.bias", "kv_dim", required=False),
)
# Of one matrix of Q, K and V, in the order of its rows.
FUSED_BIAS = (tensor("blk.{layer}.attn_qkv.bias", "qkv_dim", rotated=True, rotated_part="qk_dim"),)
ATTENTION_OUTPUT_BIAS = (tensor("blk.{layer}.attn_output.bias", "model_dim", required=False),)
FEED_FORWARD = (
    tensor("blk.{layer}.ffn_gate.weight", "model_dim", "ffn_dim"),
    tensor("blk.{layer}.ffn_up.weight", "model_dim", "ffn_dim"),
    tensor("blk.{layer}.ffn_down.weight", "ffn_dim", "model_dim"),
)
UNGATED_FEED_FORWARD = (
    tensor("blk.{layer}.ffn_up.weight", "model_dim", "ffn_dim"),
    tensor("blk.{layer}.ffn_down.weight", "ffn_dim", "model_dim"),
)
FEED_FORWARD_BIASES = (
    tensor("blk.{layer}.ffn_gate.bias", "ffn_dim", required=False),
    tensor("blk.{layer}.ffn_up.bias", "ffn_dim", required=False),
    tensor("blk.{layer}.ffn_down.bias", "model_dim", required=False),
)
UNGATED_FEED_FORWARD_BIASES = tuple(rule for rule in FEED_FORWARD_BIASES if "gate" not in rule.name)
# The first half of the rows is the gate.
FUSED_FEED_FORWARD = (
    tensor(
        "blk.{layer}.ffn_up.weight",
        "model_dim",
        "gate_up_dim",
        parts=(
            TensorPart("blk.{layer}.ffn_gate.weight", "ffn_dim"),
            TensorPart("blk.{layer}.ffn_up.weight", "ffn_dim"),
        ),
    ),
    tensor("blk.{layer}.ffn_down.weight", "ffn_dim", "model_dim"),
)
# An expert that every token goes through.
SHARED_EXPERT = tuple(
    tensor(f"blk.{{layer}}.ffn_{name}_shexp.weight", *shape, required=False)
    for name, *shape in (
        ("gate", "model_dim", "shared_ffn_dim"),
        ("up", "model_dim", "shared_ffn_dim"),
        ("down", "shared_ffn_dim", "model_dim"),
    )
)
SHARED_EXPERT_GATE = (tensor("blk.{layer}.ffn_gate_inp_shexp.weight", "model_dim"),)
# A row per expert.
EXPERT_BIASES = tuple(
    tensor(
        f"blk.{{layer}}.ffn_{name}_exps.bias",
        width,
        "n_experts",
        parts=(TensorPart(f"blk.{{layer}}.ffn_{name}_exps.{{part}}.bias", "one"),),
        is_vectors=True,
    )
    for name, width in (("gate", "ffn_dim"), ("up", "ffn_dim"), ("down", "model_dim"))
)
EXPERTS = (
    tensor("blk.{layer}.ffn_gate_inp.weight", "model_dim", "n_experts"),
    tensor("blk.{layer}.ffn_gate_exps.weight", "model_dim", "ffn_dim", "n_experts"),
    tensor("blk.{layer}.ffn_up_exps.weight", "model_dim", "ffn_dim", "n_experts"),
    tensor("blk.{layer}.ffn_down_exps.weight", "ffn_dim", "model_dim", "n_experts"),
)
# The first half of an expert's rows is the gate.
FUSED_EXPERTS = (
    tensor(
        "blk.{layer}.ffn_gate_up_exps.weight",
        "model_dim",
        "gate_up_dim",
        "n_experts",
        parts=(
            TensorPart("blk.{layer}.ffn_gate_exps.weight", "ffn_dim"),
            TensorPart("blk.{layer}.ffn_up_exps.weight", "ffn_dim"),
        ),
    ),
    tensor("blk.{layer}.ffn_down_exps.weight", "ffn_dim", "model_dim", "n_experts"),
)
# They count in the choice of experts alone.
CHOICE_BIASES = (tensor("blk.{layer}.exp_probs_b.bias", "n_experts", required=False),)
# Behind dense first layers.
BIASED_EXPERTS = (
    *tensors_of("dense", FEED_FORWARD),
    *tensors_of("experts", (*EXPERTS, *SHARED_EXPERT, *required(CHOICE_BIASES))),
)
# What chooses blocks of tokens beside plain attention.
INDEXER = tensors_of(
    "indexer",
    (
        tensor("blk.{layer}.indexer.q_proj.weight", "model_dim", "index_q_dim"),
        tensor("blk.{layer}.indexer.k_proj.weight", "model_dim", "index_key_dim"),
        tensor("blk.{layer}.indexer.q_norm.weight", "index_key_dim"),
        tensor("blk.{layer}.indexer.k_norm.weight", "index_key_dim"),
    ),
)
# What ranks documents in files whose other tensors make vectors.
CLASSIFIER = (
    *("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias"),
)
# Of a Mamba-2 layer; the norm has a row of weights for every group of heads.
MAMBA2 = (
    tensor("blk.{layer}.ssm_in.weight", "model_dim", "ssd_in_dim"),
    tensor("blk.{layer}.ssm_conv1d.weight", "n_conv_taps", "ssd_conv_dim", is_vectors=True),
    tensor("blk.{layer}.ssm_conv1d.bias", "ssd_conv_dim", required=False),
    tensor("blk.{layer}.ssm_dt.bias", "n_ssd_heads"),
    tensor("blk.{layer}.ssm_a", "one", "n_ssd_heads", is_vectors=True),
    tensor("blk.{layer}.ssm_d", "one", "n_ssd_heads", is_vectors=True),
    tensor("blk.{layer}.ssm_out.weight", "ssd_inner_dim", "model_dim"),
)
MAMBA2_NORM = tensor(
    "blk.{layer}.ssm_norm.weight",
    "ssd_group_dim",
    "n_ssd_groups",
    parts=(TensorPart("blk.{layer}.ssm_norm.{part}.weight", "one"),),
    is_vectors=True,
)
# Of a Mamba-1 layer.
MAMBA1 = (
    tensor("blk.{layer}.ssm_in.weight", "model_dim", "scan_in_dim"),
    tensor("blk.{layer}.ssm_conv1d.weight", "n_conv_taps", "n_scan_channels", is_vectors=True),
    tensor("blk.{layer}.ssm_conv1d.bias", "n_scan_channels"),
    tensor("blk.{layer}.ssm_x.weight", "n_scan_channels", "scan_projected_dim"),
    tensor("blk.{layer}.ssm_dt.weight", "scan_step_rank", "n_scan_channels"),
    tensor("blk.{layer}.ssm_dt.bias", "n_scan_channels"),
    tensor("blk.{layer}.ssm_a", "scan_state_dim", "n_scan_channels", is_vectors=True),
    tensor("blk.{layer}.ssm_d", "n_scan_channels"),
    tensor("blk.{layer}.ssm_out.weight", "n_scan_channels", "model_dim"),
)
MAMBA1_NORMS = (
    tensor("blk.{layer}.ssm_dt_norm.weight", "scan_step_rank"),
    tensor("blk.{layer}.ssm_b_norm.weight", "scan_state_dim"),
    tensor("blk.{layer}.ssm_c_norm.weight", "scan_state_dim"),
)
# Of layers that have an input of their own per token.
TOKEN_INPUTS = (
    tensor(
        "per_layer_token_embd.weight",
        "token_inputs_dim",
        "vocab_size",
        required=False,
        parts=(TensorPart("per_layer_token_embd.{part}.weight", "token_input_rows"),),
    ),
    tensor(
        "per_layer_model_proj.weight",
        "model_dim",
        "token_inputs_dim",
        required=False,
        parts=(TensorPart("blk.{part}.per_layer_model_proj.weight", "token_input_dim"),),
    ),
    tensor("per_layer_proj_norm.weight", "token_input_dim", required=False),
    tensor("blk.{layer}.inp_gate.weight", "model_dim", "token_input_dim", required=False),
    tensor("blk.{layer}.proj.weight", "token_input_dim", "model_dim", required=False),
    tensor("blk.{layer}.post_norm.weight", "model_dim", required=False),
)
