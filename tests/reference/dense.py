"""Causal attention with grouped queries: the oracle that sparse attention is compared with."""

from __future__ import annotations

import numpy as np

from tests.reference.remembered import remembered
from tests.reference.softmax_state import Array, attend


def group_queries(q: Array, n_kv_heads: int) -> Array:
    """[n_heads, n, d] -> [n_kv_heads, group, n, d]; query heads of a group are adjacent."""
    n_heads, n, d = q.shape
    return q.reshape(n_kv_heads, n_heads // n_kv_heads, n, d)


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> Array:
    """[n_heads] of ALiBi (Press et al. 2021), as its authors' code has them for any number."""

    def of_power(n: int) -> Array:
        return 2.0 ** (-max_bias * np.arange(1, n + 1) / n)

    n = 2 ** int(np.log2(n_heads))
    return np.concatenate([of_power(n), of_power(2 * n)[::2][: n_heads - n]])


@remembered
def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    is_chunked: bool = False,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    is_causal: bool = True,
    slopes: Array | None = None,
) -> Array:
    """Causal attention, full or in a sliding window; or one that reads to both sides.

    Args:
        q: [n_heads, n, d] queries at the last n positions of k.
        k: [n_kv_heads, n_keys, d] keys, n_keys >= n.
        v: [n_kv_heads, n_keys, value_dim] values.
        scale: factor of the logits; None for 1 / sqrt(d).
        window: positions that a query sees, its own included; None for all.
        is_chunked: they begin at the last multiple of the window.
        soft_cap: bound of the logits, cap * tanh(logit / cap); None for none.
        sinks: [n_heads] logits that take part in the softmax and have no value.
        is_causal: else a query sees as many positions behind it as before it.
        slopes: [n_heads] what logits lose for every position between query and key.

    Returns:
        [n_heads, n, value_dim].
    """
    n_kv_heads, n_keys, d = k.shape
    n = q.shape[1]
    query_pos = np.arange(n_keys - n, n_keys)
    distance = query_pos[:, None] - np.arange(n_keys)[None, :]
    if not is_causal:
        distance = np.abs(distance)
    visible = (distance >= 0) & (distance < (n_keys if window is None else window))
    if window is not None and is_chunked:
        visible &= np.arange(n_keys)[None, :] >= (query_pos // window * window)[:, None]
    state, _ = attend(
        group_queries(q, n_kv_heads),
        k[:, None],
        v[:, None],
        scale=d**-0.5 if scale is None else scale,
        visible=visible,
        soft_cap=soft_cap,
        biases=None
        if slopes is None
        else -slopes.reshape(n_kv_heads, -1, 1, 1) * np.abs(distance).astype(np.float64),
    )
    out = state.o.reshape(*q.shape[:2], -1)
    if sinks is None:
        return out
    others = state.log_sum_exp.reshape(q.shape[:2])
    return out / (1.0 + np.exp(sinks[:, None] - others))[..., None]


class CachedLayer:
    """Keys and values of one layer during one prompt; the options are those of `causal_attention`.

    Attributes:
        scale, window, is_chunked, soft_cap, sinks, slopes: the options.
        k, v: [n_kv_heads, n_positions, d], None before the first row.
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        window: int | None = None,
        is_chunked: bool = False,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        slopes: Array | None = None,
    ) -> None:
        self.slopes = slopes
        self.is_chunked = is_chunked
        self.sinks = sinks
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap
        self.k: Array | None = None
        self.v: Array | None = None

    def append(self, k: Array, v: Array) -> int:
        """Appends rows k, v [n_kv_heads, n, d] and returns the position of the first of them."""
        first = 0 if self.k is None else self.k.shape[1]
        self.k = k if self.k is None else np.concatenate([self.k, k], axis=1)
        self.v = v if self.v is None else np.concatenate([self.v, v], axis=1)
        return first

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        """Appends k, v; output [n_heads, n, d] of q: attention over all cached positions."""
        self.append(k, v)
        return self.read_all(q)

    def read_all(self, q: Array) -> Array:
        """Output [n_heads, n, d] of the last n cached positions, which read all before them."""
        return causal_attention(
            q,
            self.k,
            self.v,
            scale=self.scale,
            window=self.window,
            is_chunked=self.is_chunked,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            slopes=self.slopes,
        )


class DenseLayer(CachedLayer):
    """Dense attention of one layer; same face as H2OLayer."""

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        """Output of q, as `decode`; there is nothing that the prompt's end could change."""
        return self.decode(q, k, v)
