"""The recurrences of RWKV-6 (Peng et al. 2024) and of QRWKV6, token by token."""

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


def linear_attention(
    queries: Array, decays: Array, keys: Array, values: Array, state: Array
) -> tuple[Array, Array]:
    """Outputs [n, n_heads, dim] and the state after them, of gated linear attention (Yang 2024).

    Every token lets the columns of a head's state decay, writes its value along its key, as much of
    it in a column as that has decayed by, and reads it, divided by the root of ``dim``.

    Args:
        queries, decays: [n, n_heads, dim].
        keys, values: [n, n_kv_heads, dim], of neighbouring heads.
        state: [n_heads, value, key] after the tokens before.
    """
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(part, repeats, axis=1) for part in (keys, values))
    out = np.empty_like(values)
    for t in range(len(values)):
        written = values[t][:, :, None] * ((1.0 - decays[t]) * keys[t])[:, None, :]
        state = state * decays[t][:, None, :] + written
        out[t] = np.einsum("hvk,hk->hv", state, queries[t]) / np.sqrt(state.shape[2])
    return out, state
