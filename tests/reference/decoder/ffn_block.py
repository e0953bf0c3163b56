"""The feed-forward network of a layer: dense, or a mixture of experts."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.reference.softmax_state import Array

from .feed_forward import (
    ACTIVATIONS,
    by_cutoff,
    by_limit,
    by_limited_silu,
    by_xielu,
    gated,
    mixture,
    sigmoid,
    softmax,
)
from .rows import Rows


def ffn_block(rows: Rows, prefix: str, x: Array, layer_input: Array) -> Array:
    """Of rows x, or of experts that may be chosen by what the layer has got."""
    config = rows.config
    if config.family.activation == "xielu":
        activate = by_xielu(*config.xielu[int(prefix.split(".")[1])])
    else:
        activate = ACTIVATIONS[config.family.activation]
    shared_activate = activate
    layer = int(prefix.split(".")[1])
    if config.family.limits_activations:
        limits = (*config.gate_limits, 0.0)[layer], (*config.shared_limits, 0.0)[layer]
        activate, shared_activate = map(by_limited_silu, limits)
    elif config.gate_limits:
        activate = shared_activate = by_limit(config.gate_limits[layer], activate)
    normed = rows.norm(prefix + config.family.ffn_norm, x)
    if f"{prefix}pre_ffw_norm_2.weight" in rows.weights:
        out = gated(rows.linear, prefix, "", normed, activate=activate)
        return rows.norm(prefix + "post_ffw_norm_1", out) + rows.norm(
            prefix + "post_ffw_norm_2",
            mixture(
                rows.linear,
                prefix,
                rows.norm(prefix + "pre_ffw_norm_2", x),
                n_used=config.n_experts_used,
                is_normalised=True,
                activate=activate,
                router_input=rows.norm(prefix + "router_norm", x) / np.sqrt(x.shape[1]),
                factors=rows.weights[f"{prefix}ffn_down_exps.scale"],
            ),
        )
    if f"{prefix}ffn_gate_inp.weight" not in rows.weights:
        if config.gate_cutoffs:
            shared_activate = by_cutoff(config.gate_cutoffs[layer], activate)
        norm = partial(rows.norm, prefix + "ffn_sub_norm")
        return gated(rows.linear, prefix, "", normed, activate=shared_activate, norm=norm)
    out = mixture(
        rows.linear,
        prefix,
        normed,
        n_used=config.n_experts_used,
        is_normalised=config.normalises_experts,
        activate=activate,
        gate=sigmoid if config.has_sigmoid_gate else softmax,
        biases=rows.weights.get(f"{prefix}exp_probs_b.bias", 0.0),
        n_groups=config.n_expert_groups,
        n_groups_used=config.n_expert_groups_used,
        router_input=layer_input if config.family.routes_by_input else None,
        scales_inputs=config.family.scales_expert_inputs,
        n_sharers=config.n_adjugate_sharers,
        shared_scale=config.adjugate_scale,
    )
    out = out * config.expert_scale
    if f"{prefix}ffn_up_shexp.weight" in rows.weights:
        shared = gated(rows.linear, prefix, "_shexp", normed, activate=shared_activate)
        out = out + _shared_shares(rows, prefix, normed) * shared
        if config.family.halves_shared:
            out = out / 2.0
    return out


def _shared_shares(rows: Rows, prefix: str, normed: Array) -> Array | float:
    """Weights [n, 1] of the shared expert, 1 if it has no gate."""
    gate = rows.weights.get(f"{prefix}ffn_gate_inp_shexp.weight")
    if gate is None:
        return 1.0
    return sigmoid((normed @ gate.astype(np.float64))[:, None])
