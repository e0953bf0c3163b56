"""Architectures ``qwen35``, ``qwen35moe`` and ``qwen3next``: gated delta nets and gated attention.

Three of four layers have a delta net (Yang, Kautz, Hatamizadeh 2024) with a convolution before it;
in the fourth the query projection makes a gate too, head by head. ``qwen3next`` differs in which
value heads share a key head, and has both gates of the delta net in one matrix. Files of the former
two may have a layer that guesses tokens ahead (MTP), which has attention.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorRule, tensor, tensors_of


def _delta_net(*gates: TensorRule) -> tuple[TensorRule, ...]:
    return tensors_of(
        "delta_net",
        (
            tensor("blk.{layer}.attn_qkv.weight", "model_dim", "delta_conv_dim"),
            tensor("blk.{layer}.attn_gate.weight", "model_dim", "delta_value_dim"),
            *gates,
            tensor(
                "blk.{layer}.ssm_conv1d.weight", "n_conv_taps", "delta_conv_dim", is_vectors=True
            ),
            tensor("blk.{layer}.ssm_dt.bias", "n_delta_heads"),
            tensor("blk.{layer}.ssm_a", "n_delta_heads"),
            tensor("blk.{layer}.ssm_norm.weight", "delta_head_dim"),
            tensor("blk.{layer}.ssm_out.weight", "delta_value_dim", "model_dim"),
        ),
    )


_TWO_GATES = (
    tensor("blk.{layer}.ssm_beta.weight", "model_dim", "n_delta_heads"),
    tensor("blk.{layer}.ssm_alpha.weight", "model_dim", "n_delta_heads"),
)
# Of newer models.
DELTA_NET = _delta_net(*_TWO_GATES)
_ONE_MATRIX = (
    tensor("blk.{layer}.ssm_ba.weight", "model_dim", "n_delta_gates", groups="n_delta_key_heads"),
)
GATED_ATTENTION = tensors_of(
    "attention",
    (
        tensor(
            "blk.{layer}.attn_q.weight",
            "model_dim",
            "gated_q_dim",
            groups="n_heads",
            swaps_halves=True,
        ),
        tensor("blk.{layer}.attn_k.weight", "model_dim", "kv_dim", rotated=True),
        tensor("blk.{layer}.attn_v.weight", "model_dim", "kv_dim"),
        *blocks.ATTENTION_OUTPUT,
        *blocks.HEAD_NORMS,
    ),
)
QWEN_EXPERTS = (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.SHARED_EXPERT_GATE)

for _name in ("qwen35", "qwen35moe", "qwen3next"):
    _is_next = _name == "qwen3next"
    _has_experts = _name != "qwen35"
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            qk_norm="head",
            activation="silu",
            rope=RopeRule(has_sections=not _is_next),
            hybrid=HybridRule(mixer="delta_net", is_grouped=_is_next),
            experts=ExpertRule(shared="gated") if _has_experts else None,
            output_gate="of_queries",
            has_drafting_layers=True,
            can_draft=not _is_next,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.RENAMED_PRE_NORMS,
                *GATED_ATTENTION,
                *(_delta_net(*_ONE_MATRIX) if _is_next else DELTA_NET),
                *(QWEN_EXPERTS if _has_experts else blocks.FEED_FORWARD),
            ),
        )
    )
