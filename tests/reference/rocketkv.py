"""RocketKV for generated tokens, of one layer in float64.

Stage 1, at the end of a prompt of N > B tokens: s_j = sum of p_ij over the last W queries i of the
last chunk and the heads of the group, p the causal softmax over all N keys; s pooled by the maximum
over j - K // 2 .. j + K // 2 within [0, N - W); kept are the B - W largest, ties the lower, and the
last W. Else all N.
Stage 2, per generated token: page p of S kept rows has bounds u_p, l_p, as tests/reference/pages.py
rounds them. Of the channels those with the R largest sum_g |q_g| count, ties the lower; the logit
of head g is scale sum_i q_gi (u_pi if sum_g q_gi > 0 else l_pi). Pages are ordered by the softmax
over them, mean over the heads; the first and the best are read, `topk` in all, and what follows the
last block of pages.
"""

from __future__ import annotations

import numpy as np

from tests.reference.dense import DenseLayer, group_queries
from tests.reference.heavy_hitters import Positions
from tests.reference.pages import best_pages, page_bounds
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array, attend


def keep_rows(votes: Array, *, window: int, kernel: int, budget: int) -> Positions:
    """Stage 1 of `votes` [N - window]: the rows that are kept, ascending."""
    half = kernel // 2
    pooled = [votes[max(0, j - half) : j + half + 1].max() for j in range(len(votes))]
    order = np.lexsort((np.arange(len(votes)), -np.array(pooled)))[: budget - window]
    return np.concatenate([np.sort(order), np.arange(len(votes), len(votes) + window)])


def page_logits(q: Array, upper: Array, lower: Array, topr: int, scale: float) -> Array:
    """[group, n_pages] of q [group, d] and the bounds [n_pages, d]."""
    d = q.shape[1]
    channels = np.lexsort((np.arange(d), -np.abs(q).sum(axis=0)))[:topr]
    bounds = np.where(q.sum(axis=0) > 0, upper, lower)
    return scale * q[:, channels] @ bounds[:, channels].T


class RocketKvLayer(DenseLayer):
    """Dense attention to a prompt; what a generated token reads is chosen twice."""

    def __init__(
        self,
        *,
        chunk_size: int,
        prompt_budget: int = 2048,
        window: int = 32,
        kernel: int = 63,
        page_size: int = 4,
        topk: int = 64,
        topr: int = 128,
    ) -> None:
        super().__init__()
        self._chunk_size = chunk_size
        self._budget, self._window, self._kernel = prompt_budget, window, kernel
        self._page_size, self._topk, self._topr = page_size, topk, topr
        self._n_prompt = 0
        self._last: Array | None = None  # queries of the last chunk that vote

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        self._n_prompt = self.append(k, v) + k.shape[1]
        start, stop = list(chunk_bounds(q.shape[1], chunk_size=self._chunk_size))[-1]
        self._last = q[:, max(start, stop - self._window) : stop]
        return self.read_all(q)

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        n = self.append(k, v) + 1
        outputs = []
        for head, queries in enumerate(group_queries(q, self.k.shape[0])):
            positions = self._positions(head, queries[:, 0], n)
            state, _ = attend(
                queries,
                self.k[head][positions],
                self.v[head][positions],
                scale=q.shape[-1] ** -0.5,
            )
            outputs.append(state.o)
        return np.concatenate(outputs)

    def kept(self, head: int) -> Positions:
        """What is kept of the prompt."""
        n, window = self._n_prompt, self._window
        if n <= self._budget:
            return np.arange(n)
        queries = group_queries(self._last, self.k.shape[0])[head]
        own = np.arange(n - queries.shape[1], n)
        keys = self.k[head][:n]
        _, weights = attend(
            queries,
            keys,
            keys,
            scale=keys.shape[1] ** -0.5,
            visible=np.arange(n)[None, :] <= own[:, None],
        )
        votes = weights.sum(axis=(0, 1))[: n - window]
        return keep_rows(votes, window=window, kernel=self._kernel, budget=self._budget)

    def _positions(self, head: int, q: Array, n: int) -> Positions:
        kept, since = self.kept(head), np.arange(self._n_prompt, n)
        upper, lower = page_bounds(self.k[head][kept], self._page_size)
        if len(upper) <= self._topk:
            return np.concatenate([kept, since])
        logits = page_logits(q, upper, lower, self._topr, q.shape[1] ** -0.5)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        pages = best_pages(scores, self._topk)
        rows = (pages[:, None] * self._page_size + np.arange(self._page_size)).ravel()
        rest = np.arange(len(upper) * self._page_size, len(kept))
        return np.concatenate([kept[rows], kept[rest], since])
