"""Tensors of delta nets whose rows decay by themselves (Kimi Delta Attention)."""

from __future__ import annotations

from .tensors import TensorRule, tensor, tensors_of

_PARTS = ("q", "k", "v")
_TENSORS = (
    *(
        tensor(f"blk.{{layer}}.attn_{name}.weight", "model_dim", "delta_value_dim")
        for name in _PARTS
    ),
    *(
        tensor(
            f"blk.{{layer}}.ssm_conv1d_{name}.weight",
            "n_conv_taps",
            "delta_value_dim",
            is_vectors=True,
        )
        for name in _PARTS
    ),
    tensor("blk.{layer}.ssm_beta.weight", "model_dim", "n_delta_heads"),
    tensor("blk.{layer}.ssm_a", "one", "n_delta_heads", is_vectors=True),
    tensor("blk.{layer}.ssm_dt.bias", "delta_value_dim"),
    tensor("blk.{layer}.ssm_norm.weight", "delta_head_dim"),
    tensor("blk.{layer}.attn_output.weight", "delta_value_dim", "model_dim"),
)


def row_decay_tensors(*, has_vectors: bool) -> tuple[TensorRule, ...]:
    """Those of layers with one, whose decays and gates may be made of vectors (``HybridRule``)."""
    gates: list[TensorRule] = []
    for name in ("ssm_f", "ssm_g"):
        first, rank = f"blk.{{layer}}.{name}_a.weight", "delta_head_dim"
        gates.append(tensor(first, "model_dim", rank if has_vectors else "delta_value_dim"))
        if has_vectors:
            gates.append(tensor(f"blk.{{layer}}.{name}_b.weight", rank, "delta_value_dim"))
    return tensors_of("delta_net", (*_TENSORS, *gates))
