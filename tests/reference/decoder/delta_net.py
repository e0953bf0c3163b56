"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024), token by token."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def delta_net(
    q: Array, k: Array, v: Array, decays: Array, rates: Array, state: Array
) -> tuple[Array, Array]:
    """Outputs [n, heads, dim] and the state after them.

    A head's state is a matrix that a key reads a value from. Every token lets it decay, and moves
    what its key reads towards its value, by its rate.

    Args:
        q, k, v: [n, heads, dim], q and k of length 1.
        decays: [n, heads], or [n, heads, dim] where rows of a state decay by themselves.
        rates: [n, heads].
        state: [heads, dim of keys, dim of values] after the tokens before.
    """
    outputs = []
    for query, key, value, decay, rate in zip(q, k, v, decays, rates, strict=True):
        state = decay.reshape(len(decay), -1, 1) * state
        read = np.einsum("hkv,hk->hv", state, key)
        state = state + np.einsum("hk,hv->hkv", key, rate[:, None] * (value - read))
        outputs.append(np.einsum("hkv,hk->hv", state, query) / query.shape[-1] ** 0.5)
    return np.stack(outputs), state
