"""The selective scan of Mamba-1 (Gu and Dao 2023), token by token."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def selective_scan(
    x: Array, rates: Array, b: Array, c: Array, a: Array, skips: Array, state: Array
) -> tuple[Array, Array]:
    """Outputs [n, channels] and the state after them.

    Every token lets each state of a channel decay by a factor of its own, writes the channel's
    input to them as b says, and reads them as c says.

    Args:
        x: [n, channels].
        rates: [n, channels], positive.
        b, c: [n, states], the same for all channels.
        a: [channels, states], logarithms of decays by a rate of 1.
        skips: [channels], how much of x goes to the output directly.
        state: [channels, states] after the tokens before.
    """
    out = np.empty_like(x)
    for t in range(len(x)):
        decays = np.exp(rates[t, :, None] * a)
        state = decays * state + (rates[t] * x[t])[:, None] * b[t]
        out[t] = state @ c[t] + skips * x[t]
    return out, state
