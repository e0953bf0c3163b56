"""Chunked H2O sparse prefill of one layer, in float64 and in the words of its definition.

Symbols: S chunk size, L local window, H heavy hitters, M = L + H; C_c the positions of
chunk c, M_c the memory set that chunk c reads; m, l, o the state of one attention part.

Query i of chunk c sees the keys {j in C_c, j <= i} (intra) and M_c (inter); both parts
are fused into one softmax. A token's score, per KV head, is the column sum of the intra
weights of its own chunk, normalised within the chunk, plus the column sums of the inter
weights, normalised within the memory, of every later chunk that reads it; the sums run
over the queries and over the query heads of the group.
M_c = the last L positions before chunk c, and the top H by score out of
(M_{c-1} union C_{c-1}) minus those; ties go to the lower position. M_0 is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference.dense import causal_attention, group_queries
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array, SoftmaxState, attend, merge

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What happened in one chunk; G = query heads per KV head.

    Attributes:
        start, stop: absolute positions of the chunk, stop exclusive.
        memory: per KV head, the sorted positions that the chunk read besides itself.
        margins: [n_kv_heads] score of the last heavy hitter minus score of the best
            candidate left out; inf where nobody was left out.
        intra, inter: states of the two parts, m and l [n_kv_heads, G, n],
            o [n_kv_heads, G, n, d].
        intra_sums: [n_kv_heads, n] column sums over the chunk's own tokens.
        inter_sums: per KV head, column sums over `memory`.
        scores: [n_kv_heads, stop] accumulated scores after the chunk.
    """

    start: int
    stop: int
    memory: tuple[Positions, ...]
    margins: Array
    intra: SoftmaxState
    inter: SoftmaxState
    intra_sums: Array
    inter_sums: tuple[Array, ...]
    scores: Array


def select_memory(
    scores: Array, previous: Positions, chunk: tuple[int, int], *, local: int, heavy: int
) -> tuple[Positions, float]:
    """Memory set of the chunk that follows `chunk`, for one KV head.

    Args:
        scores: [n_positions] accumulated scores.
        previous: memory set that `chunk` itself read.
        chunk: (start, stop) of the chunk just scored.
        local: L.
        heavy: H.

    Returns:
        Sorted positions, and the margin as in `ChunkRecord.margins`.
    """
    start, stop = chunk
    local_start = max(0, stop - local)
    candidates = np.union1d(previous, np.arange(start, stop))
    candidates = candidates[candidates < local_start]
    # lexsort sorts by its last key first: score descending, then position ascending.
    ranked = candidates[np.lexsort((candidates, -scores[candidates]))]
    margin = np.inf
    if 0 < heavy < len(ranked):
        margin = float(scores[ranked[heavy - 1]] - scores[ranked[heavy]])
    return np.sort(np.concatenate([ranked[:heavy], np.arange(local_start, stop)])), margin


class H2OLayer:
    """One layer during one prompt: keys, values, scores and memory sets.

    Every call of `prefill` is a logical batch and opens a new chunk; scores and memory
    carry over, so several calls equal one if their boundaries fall on chunk boundaries.

    Attributes:
        scores: [n_kv_heads, n_positions] accumulated scores.
        chunks: one record per chunk.
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        local: int,
        heavy: int,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        if chunk_size < 1 or local < 0 or heavy < 0 or local + heavy == 0:
            raise ValueError("need chunk_size >= 1, local >= 0, heavy >= 0, local + heavy >= 1")
        self._chunk_size = chunk_size
        self._local = local
        self._heavy = heavy
        self._scale = scale
        self._soft_cap = soft_cap
        self._k: Array | None = None
        self._v: Array | None = None
        self.scores: Array = np.zeros((0, 0))
        self.chunks: list[ChunkRecord] = []

    def prefill(self, q: Array, k: Array, v: Array) -> Array:
        """Output [n_heads, n, d] of q [n_heads, n, d] with new rows k, v [n_kv_heads, n, d]."""
        first = self._append(k, v)
        scores = self.scores if self.scores.size else np.zeros((k.shape[0], 0))
        n_new = first + k.shape[1] - scores.shape[1]  # positions of decoded tokens too
        self.scores = np.pad(scores, ((0, 0), (0, n_new)))
        parts = [
            self._run_chunk(q[:, start:stop], first + start, first + stop)
            for start, stop in chunk_bounds(q.shape[1], chunk_size=self._chunk_size)
        ]
        return np.concatenate(parts, axis=1)

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        """Full attention over all cached positions; scores and memory stay as they are."""
        self._append(k, v)
        return causal_attention(q, self._k, self._v, scale=self._scale, soft_cap=self._soft_cap)

    def _append(self, k: Array, v: Array) -> int:
        """Appends rows and returns the position of the first of them."""
        first = 0 if self._k is None else self._k.shape[1]
        self._k = k if first == 0 else np.concatenate([self._k, k], axis=1)
        self._v = v if first == 0 else np.concatenate([self._v, v], axis=1)
        return first

    def _select(self, n_kv_heads: int, start: int) -> tuple[tuple[Positions, ...], Array]:
        """Memory set of the chunk at `start`; tokens decoded since belong to the chunk before."""
        if not self.chunks:
            empty = np.zeros(0, dtype=np.int64)
            return (empty,) * n_kv_heads, np.full(n_kv_heads, np.inf)
        last = self.chunks[-1]
        chosen = [
            select_memory(
                self.scores[head],
                last.memory[head],
                (last.start, start),
                local=self._local,
                heavy=self._heavy,
            )
            for head in range(n_kv_heads)
        ]
        return tuple(positions for positions, _ in chosen), np.array([gap for _, gap in chosen])

    def _run_chunk(self, q: Array, start: int, stop: int) -> Array:
        n_kv_heads, _, d = self._k.shape
        n = stop - start
        scale = d**-0.5 if self._scale is None else self._scale
        grouped = group_queries(q, n_kv_heads)
        chunk_k, chunk_v = self._k[:, start:stop], self._v[:, start:stop]

        intra, intra_weights = attend(
            grouped,
            chunk_k[:, None],
            chunk_v[:, None],
            scale=scale,
            soft_cap=self._soft_cap,
            visible=np.tri(n, dtype=bool),
        )
        memory, margins = self._select(n_kv_heads, start)
        inter_parts = [
            attend(
                grouped[head],
                self._k[head, positions],
                self._v[head, positions],
                scale=scale,
                soft_cap=self._soft_cap,
            )
            for head, positions in enumerate(memory)
        ]
        inter = SoftmaxState(
            m=np.stack([state.m for state, _ in inter_parts]),
            l=np.stack([state.l for state, _ in inter_parts]),
            o=np.stack([state.o for state, _ in inter_parts]),
        )

        intra_sums = intra_weights.sum(axis=(1, 2))
        inter_sums = tuple(weights.sum(axis=(0, 1)) for _, weights in inter_parts)
        self.scores[:, start:stop] += intra_sums
        for head, positions in enumerate(memory):
            self.scores[head, positions] += inter_sums[head]
        self.chunks.append(
            ChunkRecord(
                start=start,
                stop=stop,
                memory=memory,
                margins=margins,
                intra=intra,
                inter=inter,
                intra_sums=intra_sums,
                inter_sums=inter_sums,
                scores=self.scores[:, :stop].copy(),
            )
        )
        return merge(intra, inter).o.reshape(q.shape)
