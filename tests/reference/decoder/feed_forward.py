"""Feed-forward networks: gated ones, and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.softmax_state import Array

# linear(name, x): x [n, cols] times the rows of a matrix, plus its bias.
Linear = Callable[[str, Array], Array]


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def gelu(x: Array) -> Array:
    """By the hyperbolic tangent (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def gated(linear: Linear, prefix: str, suffix: str, x: Array, *, has_gelu: bool) -> Array:
    """down(activation(gate(x)) * up(x)); the suffix tells an expert's matrices."""
    gate = linear(f"{prefix}ffn_gate{suffix}", x)
    up = linear(f"{prefix}ffn_up{suffix}", x)
    activated = gelu(gate) if has_gelu else silu(gate)
    return linear(f"{prefix}ffn_down{suffix}", activated * up)


def mixture(
    linear: Linear, prefix: str, x: Array, *, n_used: int, is_normalised: bool, has_gelu: bool
) -> Array:
    """The experts of highest probability, weighted by it, or by what they have of their sum."""
    logits = linear(prefix + "ffn_gate_inp", x)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    out = np.zeros_like(x)
    for row, probability in enumerate(probabilities):
        chosen = np.argsort(-probability)[:n_used]
        total = probability[chosen].sum() if is_normalised else 1.0
        for expert in chosen:
            suffix = f"_exps.{expert}"
            output = gated(linear, prefix, suffix, x[row : row + 1], has_gelu=has_gelu)[0]
            out[row] += probability[expert] / total * output
    return out
