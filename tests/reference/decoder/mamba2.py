"""The state-space recurrence of Mamba-2 (Dao and Gu 2024), token by token."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def ssd(
    x: Array, b: Array, c: Array, decays: Array, rates: Array, skips: Array, state: Array
) -> tuple[Array, Array]:
    """Outputs [n, heads, dim] and the state after them.

    Every token lets a head's state decay, writes its input to it at the places that b names, and
    reads it at those that c names.

    Args:
        x: [n, heads, dim].
        b, c: [n, heads, rows].
        decays, rates: [n, heads].
        skips: [heads], how much of x goes to the output directly.
        state: [heads, rows, dim] after the tokens before.
    """
    out = np.empty_like(x)
    for t in range(len(x)):
        written = np.einsum("hr,hd->hrd", b[t], rates[t, :, None] * x[t])
        state = decays[t, :, None, None] * state + written
        out[t] = np.einsum("hr,hrd->hd", c[t], state) + skips[:, None] * x[t]
    return out, state
