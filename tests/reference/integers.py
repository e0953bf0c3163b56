"""Attention in integers of 8 or 16 bits, in float64, and how far it may be from exact attention.

Logits are in base 2. Keys and values come in blocks of 64 keys. Queries and keys are rounded to
steps of their largest value, values to steps of the largest of their dimension in the block, and
weights to levels of the largest of their row and block.

In 8 bits a logit is ``q . mean + q . (k - mean)`` with the mean of the key's block (after
SageAttention, Zhang et al. 2024). Queries and differences of keys are rounded after a Hadamard
matrix, which leaves their products as they are (after QuaRot, Ashkboos et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .softmax_state import Array

BLOCK = 64
# Of the power of two that weighs a logit.
POWER_ERROR = 8e-5


@dataclass(frozen=True, slots=True)
class Integers:
    """The numbers of steps of values and of levels of weights, and those of queries and keys.

    ``steps(head_dim)``: of queries, of keys.
    """

    steps: Callable[[int], tuple[int, int]]
    of_values: int
    levels: int
    are_mixed: bool

    @property
    def level_error(self) -> float:
        """Of a weight: half a level by rounding, the rest by the power of two."""
        return (0.5 + self.levels * POWER_ERROR + 1e-3) / self.levels


def _short_steps(head_dim: int) -> tuple[int, int]:
    """So many that sums of ``head_dim`` products stay below 2^31."""
    n_bits = 31 - (head_dim - 1).bit_length()
    return 2 ** ((n_bits + 1) // 2) - 1, 2 ** (n_bits // 2) - 1


INTEGERS = {
    "int8": Integers(lambda _: (127, 127), 127, 255, are_mixed=True),
    "int16": Integers(_short_steps, 4095, 8191, are_mixed=False),
}


def _steps(x: Array, axis: int, n_steps: int) -> tuple[Array, Array]:
    """Values rounded to steps of the largest along ``axis``, and the step."""
    step = np.maximum(np.abs(x).max(axis=axis, keepdims=True), 1e-30) / n_steps
    return np.rint(x / step) * step, step


def hadamard(n: int) -> Array:
    """[n, n], orthogonal: blocks of the largest power of two that divides ``n``."""
    block = np.ones((1, 1))
    while n % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.asarray(np.kron(np.eye(n // len(block)), block) / np.sqrt(len(block)))


def causal_integer_attention(
    q: Array, k: Array, v: Array, integers: Integers
) -> tuple[Array, Array]:
    """Attention of one head to the keys up to each query's own, and the bound of its error.

    Args:
        q, k: [n, head_dim].
        v: [n, value_dim].

    Returns:
        What the rounded operands give, and for every output how far exact attention may be from it,
        both [n, value_dim]. With ``e`` the error of a logit, ``half_step_q sum|k'| + half_step_k
        sum|q|`` of what is rounded, and ``w`` a weight, its error is ``w (2^e - 1)`` and that of a
        level; an output is a mean of values, so that it is off by the errors of weights times the
        distance of values from it, and by half a step of the values.
    """
    n = len(q)
    float_error = (q.shape[1] + 8) * np.finfo(np.float32).eps  # of sums in float32
    mixing = hadamard(q.shape[1]) if integers.are_mixed else np.eye(q.shape[1])
    mixed_q = q @ mixing
    of_queries, of_keys = integers.steps(q.shape[1])
    rounded_q, q_step = _steps(mixed_q, 1, of_queries)
    visible = np.tri(n, dtype=bool)
    exact = np.where(visible, q @ k.T, -np.inf)
    logits, errors, values, v_steps = np.empty((n, n)), np.empty((n, n)), v.copy(), v.copy()
    for begin in range(0, n, BLOCK):
        block = slice(begin, begin + BLOCK)
        mean = k[block].mean(axis=0) if integers.are_mixed else np.zeros(k.shape[1])
        rounded_k, k_step = _steps((k[block] - mean) @ mixing, 1, of_keys)
        logits[:, block] = q @ mean[:, None] + rounded_q @ rounded_k.T
        errors[:, block] = (
            q_step / 2 * np.abs(rounded_k).sum(axis=1)
            + np.abs(mixed_q).sum(axis=1)[:, None] * k_step.T / 2
            + float_error * np.abs(q) @ (np.abs(k[block]) + 2 * np.abs(mean)).T
        )
        values[block], v_steps[block] = _steps(v[block], 0, integers.of_values)
    logits[~visible] = -np.inf
    maximum = logits.max(axis=1, keepdims=True)
    weights, weight_errors = np.zeros((n, n)), np.zeros((n, n))
    true_weights = np.exp2(exact - maximum)
    for begin in range(0, n, BLOCK):
        block = slice(begin, begin + BLOCK)
        rows = slice(begin, None)  # the others see nothing of the block
        top = logits[rows, block].max(axis=1, keepdims=True)
        unit = np.exp2(top - maximum[rows])
        levels = np.rint(integers.levels * np.exp2(logits[rows, block] - top))
        weights[rows, block] = levels / integers.levels * unit
        weight_errors[rows, block] = integers.level_error * unit
    weight_errors += true_weights * (np.exp2(errors * 1.0001 + 1e-5) - 1)
    weight_errors[~visible] = 0
    total = weights.sum(axis=1, keepdims=True)
    output = weights @ values / total
    center = true_weights @ v / true_weights.sum(axis=1, keepdims=True)
    bound = (
        np.einsum("ij,ijd->id", weight_errors, np.abs(v - center[:, None])) + weights @ v_steps / 2
    )
    smallest_total = true_weights.sum(axis=1, keepdims=True) - weight_errors.sum(
        axis=1, keepdims=True
    )
    return output, bound * 1.001 / np.maximum(smallest_total, 1e-9) + 1e-5
