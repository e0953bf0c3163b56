"""The recurrence of RWKV-7 (Peng et al. 2025), token by token."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def wkv(
    queries: Array,
    decays: Array,
    keys: Array,
    values: Array,
    directions: Array,
    rates: Array,
    state: Array,
) -> tuple[Array, Array]:
    """Outputs [n, n_heads, dim] and the state after them.

    Every token lets the columns of a head's state decay, takes from it what it has along a
    direction, at the rate of every column, and writes its value along its key.

    Args:
        queries, decays, keys, values, directions, rates: [n, n_heads, dim].
        state: [n_heads, value, key] after the tokens before.
    """
    out = np.empty_like(values)
    for t in range(len(values)):
        along = np.einsum("hvk,hk->hv", state, directions[t])
        state = (
            state * decays[t][:, None, :]
            - along[:, :, None] * (directions[t] * rates[t])[:, None, :]
            + values[t][:, :, None] * keys[t][:, None, :]
        )
        out[t] = np.einsum("hvk,hk->hv", state, queries[t])
    return out, state
