"""Weights by the names that the reference gives them, of matrices that files have as one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .latent import LatentSizes

Weights = dict[str, NDArray[np.float32]]


def name_parallel_norms(weights: Weights) -> None:
    """Where a file has no norm of networks, it is that of attention, or the first of two."""
    for name in [name for name in weights if ".attn_norm." in name]:
        weights.setdefault(name.replace("attn_norm", "ffn_norm"), weights[name])
        weights[name] = weights.pop(name.replace("attn_norm", "attn_norm_2"), weights[name])


def split_fused(weights: Weights, prefix: str, key_dim: int, value_dim: int) -> None:
    """Makes matrices of their own of Q, K, V and of gate and up, where they are one."""
    if f"{prefix}attn_qkv.weight" in weights and f"{prefix}attn_output.weight" in weights:
        q_dim = weights[f"{prefix}attn_output.weight"].shape[1]
        q_dim = q_dim // value_dim * key_dim
        for kind in ("weight", "bias"):
            qkv = weights.pop(f"{prefix}attn_qkv.{kind}", None)
            if qkv is None:
                continue
            k_dim = (len(qkv) - q_dim) * key_dim // (key_dim + value_dim)
            parts = np.split(qkv, [q_dim, q_dim + k_dim])
            for name, part in zip("qkv", parts, strict=True):
                weights[f"{prefix}attn_{name}.{kind}"] = part
    shared, shared_down = (
        weights.get(f"{prefix}ffn_{name}_shexp.weight") for name in ("up", "down")
    )
    if shared is not None and shared_down is not None and len(shared) == 2 * shared_down.shape[1]:
        for name, half in zip(("gate", "up"), np.split(shared, 2), strict=True):
            weights[f"{prefix}ffn_{name}_shexp.weight"] = half
    has_gate = any(name.startswith(f"{prefix}ffn_gate") for name in weights)
    up, down = (weights.get(f"{prefix}ffn_{name}.weight") for name in ("up", "down"))
    if not has_gate and up is not None and down is not None and len(up) == 2 * down.shape[1]:
        gate, up = np.split(weights.pop(f"{prefix}ffn_up.weight"), 2)
        weights[f"{prefix}ffn_gate.weight"], weights[f"{prefix}ffn_up.weight"] = gate, up


def split_latent(weights: Weights, prefix: str, sizes: LatentSizes) -> None:
    """Makes W_k [heads, nope, rank] and W_v [heads, value, rank] of what the file has."""
    joint = weights.pop(f"{prefix}attn_kv_b.weight", None)
    if joint is None:
        weights[f"{prefix}attn_k_b.weight"] = weights[f"{prefix}attn_k_b.weight"].swapaxes(1, 2)
        return
    # W_v has as many columns as the output matrix, W_k a known number for each head.
    n_values = weights[f"{prefix}attn_output.weight"].shape[1]
    heads = joint.reshape((len(joint) - n_values) // sizes.nope_dim, -1, sizes.rank)
    weights[f"{prefix}attn_k_b.weight"] = heads[:, : sizes.nope_dim]
    weights[f"{prefix}attn_v_b.weight"] = heads[:, sizes.nope_dim :]


def name_experts(weights: Weights) -> None:
    """Makes matrices ``ffn_up_exps.3.weight`` of the stacks ``ffn_up_exps.weight``, and names what
    files name otherwise."""
    for name in [
        name
        for name in weights
        if name.endswith(("_exps.weight", "_chexps.weight", ".time_mix_w2.weight"))
    ]:
        if weights[name].ndim == 2:
            continue
        for index, matrix in enumerate(weights.pop(name)):
            weights[name.replace(".weight", f".{index}.weight")] = matrix
    bare = ("_attention_norm", "post_ffw_norm", *(f".ssm_{name}_norm" for name in ("dt", "b", "c")))
    for name in [name for name in weights if name.endswith(bare)]:
        weights[f"{name}.weight"] = weights.pop(name)
    for name in [name for name in weights if name.endswith(".exp_probs_b")]:
        weights[f"{name}.bias"] = weights.pop(name)
    for name in [name for name in weights if ".ffn_gate_up_exps." in name]:
        gate, up = np.split(weights.pop(name), 2)
        weights[name.replace("gate_up", "gate")], weights[name.replace("gate_up", "up")] = gate, up
    for name in [name for name in weights if name.endswith("gate_inp.scale")]:
        weights[name.replace("ffn_gate_inp.scale", "router_norm.weight")] = weights.pop(name)
    for name in [name for name in weights if name.endswith("_exps.bias")]:
        for index, vector in enumerate(weights.pop(name)):
            weights[name.replace(".bias", f".{index}.bias")] = vector
