"""Softmax attention over one part of the keys, and the exact merge of two parts.

A part is described by (m, l, o): the row maximum of its logits, the row sum of
exp(logit - m), and its own normalised output. An empty part has m = -inf, l = 0, o = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """State of attention over one part of the keys.

    Attributes:
        m: [..., n] row maxima of the logits.
        l: [..., n] row sums of exp(logit - m).
        o: [..., n, d] output normalised within the part.
    """

    m: Array
    l: Array  # noqa: E741 - the symbol of the formula
    o: Array

    @property
    def log_sum_exp(self) -> Array:
        """[..., n] logarithm of the unshifted row sums; -inf for an empty part."""
        with np.errstate(divide="ignore"):
            return self.m + np.log(self.l)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    visible: NDArray[np.bool_] | None = None,
    soft_cap: float | None = None,
    biases: Array | None = None,
) -> tuple[SoftmaxState, Array]:
    """Attention of queries over one set of keys.

    Args:
        q: [..., n, d] queries.
        k: [..., n_keys, d] keys; leading axes broadcast against those of q.
        v: [..., n_keys, d] values.
        scale: factor of the logits, usually 1 / sqrt(d).
        visible: [n, n_keys] mask, True where the query may read the key; None for all.
        soft_cap: bound of the logits, cap * tanh(logit / cap); None for none.
        biases: [n_keys], or of every query, added to the scaled and capped logits; None for zeros.

    Returns:
        The state, and the weights [..., n, n_keys] normalised within the part.
    """
    logits = scale * (q @ np.swapaxes(k, -1, -2))
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if biases is not None:
        logits = logits + biases
    if visible is not None:
        logits = np.where(visible, logits, -np.inf)
    m = logits.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(m), m, 0.0)
    weights = np.exp(logits - shift[..., None])
    row_sum = weights.sum(axis=-1)
    weights = weights / np.where(row_sum > 0.0, row_sum, 1.0)[..., None]
    return SoftmaxState(m=m, l=row_sum, o=weights @ v), weights


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """State over the union of two disjoint key sets; exact, commutative, associative."""
    m = np.maximum(a.m, b.m)
    shift = np.where(np.isfinite(m), m, 0.0)
    weight_a = a.l * np.exp(a.m - shift)
    weight_b = b.l * np.exp(b.m - shift)
    row_sum = weight_a + weight_b
    divisor = np.where(row_sum > 0.0, row_sum, 1.0)
    o = (weight_a[..., None] * a.o + weight_b[..., None] * b.o) / divisor[..., None]
    return SoftmaxState(m=m, l=row_sum, o=o)
