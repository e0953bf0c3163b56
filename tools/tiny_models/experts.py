"""Mixtures of experts of tiny models: routers, stacked matrices, the shared expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.fused import fuse_rows
from tools.tiny_models.model import TinyModel

ROUTER_SUFFIX = ".ffn_gate_inp.weight"


def add_layer(
    tensors: dict[str, NDArray[np.float32]],
    normal: Callable[..., None],
    model: TinyModel,
    layer: int,
) -> None:
    """Puts experts in the place of a layer's dense feed-forward network."""
    family, width, n_experts = model.family, model.model_dim, model.n_experts
    prefix = f"blk.{layer}"
    n_heads, _, ffn_dim = model.layers[layer]
    if family.has_expert_bias and not model.has_softmax_gate:
        normal(f"{prefix}.{family.expert_bias_name}", n_experts, std=0.3)
    normal(prefix + ROUTER_SUFFIX, n_experts, width, std=2.0 * width**-0.5)
    for name, rows, cols in (
        ("ffn_gate", ffn_dim, width),
        ("ffn_up", ffn_dim, width),
        ("ffn_down", width, ffn_dim),
    ):
        if tensors.pop(f"{prefix}.{name}.weight", None) is not None:
            normal(f"{prefix}.{name}_exps.weight", n_experts, rows, cols, std=cols**-0.5)
        if family.has_sum_norms:
            tensors.pop(f"{prefix}.{name}.bias", None)
    if family.is_gpt_oss:
        normal(f"{prefix}.ffn_gate_inp.bias", n_experts, std=0.3)
        normal(f"{prefix}.attn_sinks.weight", n_heads, std=1.0, mean=1.0)
        normal(f"{prefix}.attn_output.bias", width, std=0.2)
        for name, rows in (("gate", ffn_dim), ("up", ffn_dim), ("down", width)):
            normal(f"{prefix}.ffn_{name}_exps.bias", n_experts, rows, std=0.2)
    if family.has_adjugates:
        n, dim = n_experts // model.n_adjugate_sharers, model.adjugate_ffn_dim
        for name, rows, cols in (("gate", dim, width), ("up", dim, width), ("down", width, dim)):
            normal(f"{prefix}.ffn_{name}_chexps.weight", n, rows, cols, std=cols**-0.5)
    shared_dim = _add_shared(normal, model, prefix, ffn_dim)
    if family.has_fused_experts or model.joins_experts:
        halves = [tensors.pop(f"{prefix}.ffn_{name}_exps.weight") for name in ("gate", "up")]
        tensors[f"{prefix}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)
        if shared_dim and family.has_fused_experts:
            fuse_rows(tensors, f"{prefix}.", "ffn_up_shexp", ("ffn_gate_shexp", "ffn_up_shexp"))


def _add_shared(normal: Callable[..., None], model: TinyModel, prefix: str, ffn_dim: int) -> int:
    """The expert that every token goes through, if there is one; returns its width or 0."""
    family, width = model.family, model.model_dim
    # Without a key, one with a gate is as wide as feed_forward_length says.
    has_gate = family.mamba2 != "single"
    has_shared = family.shared_gate or family.has_shared_width or family.has_equal_shared
    n_shared = int(has_shared or not has_gate)
    if family.is_latent or family.has_expert_scales:
        n_shared = model.n_shared_experts
    shared_dim = model.shared_ffn_dim or n_shared * ffn_dim
    if shared_dim:
        if has_gate:
            normal(f"{prefix}.ffn_gate_shexp.weight", shared_dim, width, std=width**-0.5)
        normal(f"{prefix}.ffn_up_shexp.weight", shared_dim, width, std=width**-0.5)
        normal(f"{prefix}.ffn_down_shexp.weight", width, shared_dim, std=shared_dim**-0.5)
    if family.shared_gate:
        normal(f"{prefix}.ffn_gate_inp_shexp.weight", width, std=2.0 * width**-0.5)
    return shared_dim
