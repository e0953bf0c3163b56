"""Architectures ``nemotron_h`` and ``nemotron_h_moe``: layers of one branch each.

A layer is Mamba-2, attention or a feed-forward network, or in ``nemotron_h_moe`` a mixture of
experts with a shared one. Feed-forward networks have no gate, and the square of ReLU between their
two matrices. Attention has no positions.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

_NORM = tensor("blk.{layer}.attn_norm.weight", "model_dim")
_FEED_FORWARD = (
    tensor("blk.{layer}.ffn_up.weight", "model_dim", "ffn_dim"),
    tensor("blk.{layer}.ffn_up.bias", "ffn_dim", required=False),
    tensor("blk.{layer}.ffn_down.weight", "ffn_dim", "model_dim"),
    tensor("blk.{layer}.ffn_down.bias", "model_dim", required=False),
)
_EXPERTS = (
    tensor("blk.{layer}.ffn_gate_inp.weight", "model_dim", "n_experts"),
    tensor("blk.{layer}.exp_probs_b.bias", "n_experts"),
    tensor("blk.{layer}.ffn_up_exps.weight", "model_dim", "ffn_dim", "n_experts"),
    tensor("blk.{layer}.ffn_down_exps.weight", "ffn_dim", "model_dim", "n_experts"),
    tensor("blk.{layer}.ffn_up_shexp.weight", "model_dim", "shared_ffn_dim"),
    tensor("blk.{layer}.ffn_down_shexp.weight", "shared_ffn_dim", "model_dim"),
)

for _name, _experts, _feed_forward in (
    ("nemotron_h", None, _FEED_FORWARD),
    (
        "nemotron_h_moe",
        ExpertRule(
            shared="required", gate="sigmoid", says_gate=False, has_bias=True, has_scales=True
        ),
        _EXPERTS,
    ),
):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            activation="relu_squared",
            rope=RopeRule(none_every=1),
            hybrid=HybridRule(mixer="mamba2", has_one_branch=True),
            experts=_experts,
            scales={"attention_scale": "attention.scale"},
            tensors=(
                *blocks.EMBEDDINGS,
                *tensors_of("mamba2", (_NORM, *blocks.MAMBA2, blocks.MAMBA2_NORM)),
                *tensors_of(
                    "attention",
                    (_NORM, *blocks.ATTENTION, *blocks.QKV_BIASES, *blocks.ATTENTION_OUTPUT_BIAS),
                ),
                *tensors_of(
                    "none",
                    (replace(_NORM, core_name="blk.{layer}.ffn_norm.weight"), *_feed_forward),
                ),
            ),
        )
    )
