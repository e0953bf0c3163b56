"""Decode that reads the pages it asks for, of one layer in float64."""

from __future__ import annotations

import numpy as np

from tests.reference.dense import DenseLayer, group_queries
from tests.reference.pages import BLOCK_PAGES, best_pages, largest_bounds
from tests.reference.softmax_state import Array, attend


class QuestLayer(DenseLayer):
    """Dense attention to a prompt; a generated token reads ``tokens // page_size`` of its pages.

    Those with the largest bounds of a logit, the first one, what follows the last block of pages,
    and all positions since the prompt. Everything if there are no more pages than that.
    """

    def __init__(self, *, tokens: int, page_size: int) -> None:
        super().__init__()
        self._n_kept = max(1, tokens // page_size)
        self._page_size = page_size
        self._n_prompt = 0

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        self._n_prompt = self.append(k, v) + k.shape[1]
        return self.read_all(q)

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        n = self.append(k, v) + 1
        outputs = []
        for head, queries in enumerate(group_queries(q, self.k.shape[0])):
            positions = self._positions(queries[:, 0], self.k[head], n)
            state, _ = attend(
                queries,
                self.k[head][positions],
                self.v[head][positions],
                scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
                soft_cap=self.soft_cap,
            )
            outputs.append(state.o)
        return np.concatenate(outputs)

    def _positions(self, q: Array, k: Array, n: int) -> np.ndarray:
        size = self._page_size
        if self._n_prompt // (BLOCK_PAGES * size) * BLOCK_PAGES <= self._n_kept:
            return np.arange(n)
        scores = largest_bounds(q, k[: self._n_prompt], size)
        pages = best_pages(scores, self._n_kept)
        chosen = (pages[:, None] * size + np.arange(size)).ravel()
        return np.concatenate([chosen, np.arange(len(scores) * size, n)])
