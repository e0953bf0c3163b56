"""The recurrence of RWKV-6 (Peng et al. 2024), token by token."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def wkv6(
    queries: Array, decays: Array, keys: Array, values: Array, first: Array, state: Array
) -> tuple[Array, Array]:
    """Outputs [n, n_heads, dim] and the state after them.

    Every token reads the columns of a head's state as they were before it, and its own value by
    the weights ``first``; then it lets the columns decay, and writes its value along its key.

    Args:
        queries, decays, keys, values: [n, n_heads, dim].
        first: [n_heads, dim].
        state: [n_heads, value, key] after the tokens before.
    """
    out = np.empty_like(values)
    for t in range(len(values)):
        written = values[t][:, :, None] * keys[t][:, None, :]
        out[t] = np.einsum("hvk,hk->hv", state + first[:, None, :] * written, queries[t])
        state = state * decays[t][:, None, :] + written
    return out, state
