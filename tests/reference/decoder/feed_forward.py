"""Feed-forward networks: gated ones, and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.softmax_state import Array

from .streams import cut_off

# activate(gate, up)
Activate = Callable[[Array, Array], Array]
# linear(name, x): x [n, cols] times the rows of a matrix, plus its bias.
Linear = Callable[[str, Array], Array]


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def gelu(x: Array) -> Array:
    """By the hyperbolic tangent (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def by_silu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def by_gelu(gate: Array, up: Array) -> Array:
    return gelu(gate) * up


def by_relu(gate: Array, up: Array) -> Array:
    """The square, if both are the same."""
    return np.maximum(gate, 0.0) * up


def by_ungated_gelu(gate: Array, up: Array) -> Array:
    """Without a gate, in whose place the same is."""
    return gelu(up)


def by_xielu(alpha_p: float, alpha_n: float, beta: float, eps: float) -> Activate:
    """Of a network without a gate (Huang and Schlag 2024), by the numbers of a file."""
    positive, negative = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))

    def activate(gate: Array, up: Array) -> Array:
        below = negative * (np.expm1(np.minimum(up, eps)) - up)
        return np.where(up > 0.0, positive * up**2, below) + beta * up

    return activate


def by_clamped_silu(gate: Array, up: Array) -> Array:
    """That of gpt-oss: both are bounded, the gate is steeper, and 1 is added to the other."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)


def by_cutoff(n_stds: float, activate: Activate) -> Activate:
    """Of the gate, what lies so many standard deviations above its mean; -inf: all of it."""
    if np.isneginf(n_stds):
        return activate
    return lambda gate, up: activate(cut_off(gate, n_stds), up)


def by_limit(limit: float, activate: Activate) -> Activate:
    """Of the gate what is at most the limit, of the other what lies between two; 0: all."""
    if limit == 0.0:
        return activate
    return lambda gate, up: activate(np.minimum(gate, limit), np.clip(up, -limit, limit))


def by_limited_silu(limit: float) -> Activate:
    """The limit is of what comes out of the activation (Step 3.5); 0: none."""
    if limit == 0.0:
        return by_silu
    return lambda gate, up: np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)


ACTIVATIONS: dict[str, Activate] = {
    "silu": by_silu,
    "gelu": by_gelu,
    "relu": by_relu,
    "clamped": by_clamped_silu,
    "ungated_gelu": by_ungated_gelu,
}


def gated(
    linear: Linear,
    prefix: str,
    suffix: str,
    x: Array,
    *,
    activate: Activate,
    norm: Callable[[Array], Array] = lambda product: product,
) -> Array:
    """down(norm(activate(gate(x), up(x)))); the suffix tells an expert's matrices."""
    gate = linear(f"{prefix}ffn_gate{suffix}", x)
    up = linear(f"{prefix}ffn_up{suffix}", x)
    return linear(f"{prefix}ffn_down{suffix}", norm(activate(gate, up)))


def softmax(logits: Array) -> Array:
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-logits))


def softplus(logits: Array) -> Array:
    return np.log1p(np.exp(logits))


def mixture(
    linear: Linear,
    prefix: str,
    x: Array,
    *,
    n_used: int,
    is_normalised: bool,
    activate: Activate,
    gate: Callable[[Array], Array] = softmax,
    biases: Array | float = 0.0,
    n_groups: int = 1,
    n_groups_used: int = 1,
    router_input: Array | None = None,
    factors: Array | None = None,
    scales_inputs: bool = False,
    n_sharers: int = 0,
    shared_scale: float = 0.0,
) -> Array:
    """The experts of highest probability, weighted by it, or by what they have of their sum.

    ``biases`` count in the choice alone. Of several groups of neighbours those are chosen first
    whose two best experts are the best. ``factors`` are of experts, and ``router_input`` is what
    they are chosen by, if it is not x. With ``scales_inputs`` shares are factors of what goes in.
    Each ``n_sharers`` neighbours share another expert, which counts by ``shared_scale`` for all of
    them that are chosen.
    """
    probabilities = gate(
        linear(prefix + "ffn_gate_inp", x if router_input is None else router_input)
    )
    is_chosen, shares = np.zeros(probabilities.shape, bool), np.zeros_like(probabilities)
    for row, probability in enumerate(probabilities):
        ranks = probability + biases
        if n_groups > 1:
            groups = np.sort(ranks.reshape(n_groups, -1))[:, -2:].sum(axis=1)
            is_left_out = np.ones(n_groups, bool)
            is_left_out[np.argsort(-groups)[:n_groups_used]] = False
            ranks = np.where(np.repeat(is_left_out, len(ranks) // n_groups), -np.inf, ranks)
        chosen = np.argsort(-ranks)[:n_used]
        total = probability[chosen].sum() if is_normalised else 1.0
        is_chosen[row, chosen] = True
        shares[row, chosen] = probability[chosen] / total
    out = np.zeros_like(x)
    for expert in range(probabilities.shape[1]):
        rows = np.flatnonzero(is_chosen[:, expert])
        share = shares[rows, expert, None]
        source = x[rows] * (share if scales_inputs else 1.0)
        output = gated(linear, prefix, f"_exps.{expert}", source, activate=activate)
        factor = 1.0 if factors is None else factors[expert]
        out[rows] += factor * (1.0 if scales_inputs else share) * output
        if n_sharers:
            suffix = f"_chexps.{expert // n_sharers}"
            output = gated(linear, prefix, suffix, x[rows], activate=activate)
            out[rows] += shared_scale * share * output
    return out
