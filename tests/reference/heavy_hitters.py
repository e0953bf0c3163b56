"""What the oracles with heavy hitters share: column sums that decay, and the choice by score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.reference.softmax_state import Array

Positions = NDArray[np.int64]

# A mean over fewer queries would let a few of them decide.
MIN_AGE = 32.0


class ColumnSums:
    """What every position received, and how many queries it was seen by, per KV head.

    When a chunk that sees position j adds to it, s_j <- decay s_j + sum and
    n_j <- decay n_j + number of queries.

    Attributes:
        sums, ages: s and n, [n_kv_heads, n_positions].
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        self._decay = decay
        self.sums: Array = np.zeros((0, 0))
        self.ages: Array = np.zeros((0, 0))

    def grow(self, n_kv_heads: int, n_positions: int) -> None:
        """Takes in the positions below `n_positions`, with zeros where they are new."""
        old = self.sums if self.sums.size else np.zeros((n_kv_heads, 0))
        widths = ((0, 0), (0, n_positions - old.shape[1]))
        self.ages = np.pad(self.ages.reshape(old.shape), widths)
        self.sums = np.pad(old, widths)

    def add(
        self, head: int, positions: Positions, sums: Array, n_queries: int | NDArray[np.int64]
    ) -> None:
        """Adds a chunk's column sums over `positions`, each seen by `n_queries` of its queries."""
        for state, new in ((self.sums, sums), (self.ages, n_queries)):
            state[head, positions] = self._decay * state[head, positions] + new

    def means(self, head: int) -> Array:
        """[n_positions] s_j / max(n_j, MIN_AGE)."""
        return self.sums[head] / np.maximum(self.ages[head], MIN_AGE)


def select_memory(
    scores: Array,
    previous: Positions,
    chunk: tuple[int, int],
    *,
    local: int,
    heavy: int,
    sinks: int = 0,
) -> tuple[Positions, float]:
    """Memory set of the chunk that follows `chunk`, for one KV head.

    It is the first `sinks` positions, the last `local` ones before the chunk, and the `heavy` best
    scored of (`previous` united with `chunk`) without those; ties go to the lower position.

    Args:
        scores: [n_positions] scores.
        previous: memory set that `chunk` itself read.
        chunk: (start, stop) of the chunk just scored.
        local: L.
        heavy: H.
        sinks: number of sinks.

    Returns:
        Sorted positions, and the score of the last heavy hitter minus that of the best candidate
        left out; inf where nobody was left out.
    """
    start, stop = chunk
    local_start = max(0, stop - local)
    forced = np.union1d(np.arange(min(sinks, stop)), np.arange(local_start, stop))
    candidates = np.setdiff1d(np.union1d(previous, np.arange(start, stop)), forced)
    # lexsort sorts by its last key first: score descending, then position ascending.
    ranked = candidates[np.lexsort((candidates, -scores[candidates]))]
    margin = np.inf
    if 0 < heavy < len(ranked):
        margin = float(scores[ranked[heavy - 1]] - scores[ranked[heavy]])
    return np.union1d(ranked[:heavy], forced), margin
