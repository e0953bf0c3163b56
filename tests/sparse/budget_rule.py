"""A sparse rule in Python that uses everything the policy interface offers.

Every KV head has its own budget, up to the whole past; scores are mean joint weights that decay;
positions outside the memory are stood for by the mean key and value of their page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FULL = 10**9
PAGE = 16
DECAY = 0.9
MIN_AGE = 8.0

Chunk = tuple[int, int]
Array = NDArray[np.float64]


@dataclass(slots=True)
class Selection:
    """What one chunk of one KV head read, and the column sums that came back."""

    chunk: Chunk
    positions: NDArray[np.int32]
    keys: Array
    values: Array
    biases: Array
    intra_sums: Array | None = None
    memory_sums: Array | None = None


@dataclass(slots=True)
class BudgetRule:
    """`budgets[kv_head]` positions per memory set; FULL heads are dense and get no scores."""

    budgets: tuple[int, ...]
    local: int
    max_context: int
    with_pages: bool = True
    selections: dict[int, list[Selection]] = field(default_factory=dict)
    weights: Array = field(init=False)
    ages: Array = field(init=False)

    def begin_prompt(self) -> None:
        n_heads = len(self.budgets)
        self.selections = {head: [] for head in range(n_heads)}
        self.weights = np.zeros((n_heads, self.max_context))
        self.ages = np.zeros((n_heads, self.max_context))

    def is_scored(self, layer: int, kv_head: int) -> bool:
        return self.budgets[kv_head] != FULL

    def select_memory(
        self,
        layer: int,
        kv_head: int,
        chunk: Chunk,
        queries: NDArray[np.float32],
        past_keys: NDArray[np.float16],
        past_values: NDArray[np.float16],
    ) -> object:
        begin, end = chunk
        assert queries.shape[0] == end - begin and len(past_keys) == begin
        budget = min(self.budgets[kv_head], begin)
        local = min(self.local, budget // 2)
        score = self.weights[kv_head, :begin] / np.maximum(self.ages[kv_head, :begin], MIN_AGE)
        score[begin - local :] = np.inf
        ranked = np.lexsort((np.arange(begin), -score))
        positions = np.sort(ranked[:budget]).astype(np.int32)
        self.weights[kv_head] *= DECAY
        self.ages[kv_head] *= DECAY
        pages = self._pages(positions, past_keys, past_values)
        self.selections[kv_head].append(Selection(chunk, positions, *pages))
        return (positions, *pages) if self.with_pages else positions

    def _pages(
        self, positions: NDArray[np.int32], keys: NDArray[np.float16], values: NDArray[np.float16]
    ) -> tuple[Array, Array, Array]:
        is_left_out = np.ones(len(keys), dtype=bool)
        is_left_out[positions] = False
        rows: list[tuple[Array, Array, float]] = []
        for first in range(0, len(keys) - PAGE + 1, PAGE) if self.with_pages else ():
            members = first + np.flatnonzero(is_left_out[first : first + PAGE])
            if len(members):
                means = (array[members].astype(np.float64).mean(axis=0) for array in (keys, values))
                rows.append((*means, float(np.log(len(members)))))
        head_dim = keys.shape[1]
        return (
            np.array([key for key, _, _ in rows]).reshape(-1, head_dim),
            np.array([value for _, value, _ in rows]).reshape(-1, head_dim),
            np.array([bias for _, _, bias in rows]),
        )

    def observe_intra(
        self, layer: int, kv_head: int, chunk: Chunk, sums: NDArray[np.float32]
    ) -> None:
        begin, end = chunk
        self.weights[kv_head, begin:end] += sums
        self.ages[kv_head, begin:end] += np.arange(end - begin, 0, -1)
        for selection in self.selections[kv_head]:
            if selection.chunk == chunk:
                selection.intra_sums = sums.astype(np.float64)

    def observe_memory(
        self,
        layer: int,
        kv_head: int,
        chunk: Chunk,
        positions: NDArray[np.int32],
        sums: NDArray[np.float32],
    ) -> None:
        self.weights[kv_head, positions] += sums
        self.ages[kv_head, positions] += chunk[1] - chunk[0]
        selection = self.selections[kv_head][-1]
        assert selection.chunk == chunk and np.array_equal(selection.positions, positions)
        selection.memory_sums = sums.astype(np.float64)
