"""Chunked H2O sparse prefill of one layer, in float64 and in the words of its definition.

Symbols: S chunk size, L local window, H heavy hitters; C_c the positions of chunk c, M_c the
memory set that chunk c reads; m, l, o the state of one attention part.

Query i of chunk c sees the keys {j in C_c, j <= i} (intra) and M_c (inter); both parts are fused
into one softmax. M_c = the first `sinks` positions, the last L positions before chunk c, and the
top H by score out of (M_{c-1} united with C_{c-1}) minus those; ties go to the lower position.
M_0 is empty.

Scores rest on column sums per KV head: for j in C_c of the intra weights, normalised within the
chunk, for j in M_c of the inter weights, normalised within the memory. The sums run over the
queries i and over the query heads of the group, with a weight w_i for each query, and accumulate:
s_j <- decay s_j + sum_i w_i A_ij, n_j <- decay n_j + number of queries that see j. The score is
    sum     s_j with w_i = 1;
    mean    s_j / max(n_j, 32) with w_i = 1;
    lift    the same with w_i = the number of keys of that part that query i sees;
    window  s_j of chunk c alone, with w_i = 1 for the last `window` queries of C_c, else 0;
and `by_values` multiplies it by the norm of v_j.

Dense tail: when the prompt ends, the last T queries of that call read everything before them; the
chunks end where the tail begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.reference.dense import CachedLayer, group_queries
from tests.reference.heavy_hitters import ColumnSums, Positions, select_memory
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array, SoftmaxState, attend, merge

Score = Literal["sum", "mean", "lift", "window"]


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
        scores: [n_kv_heads, stop] accumulated column sums s after the chunk.
        ranks: [n_kv_heads, stop] the scores that follow from them, without norms.
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
    ranks: Array


class H2OLayer(CachedLayer):
    """One layer during one prompt: keys, values, scores and memory sets.

    Every call of `prefill` is a logical batch and opens a new chunk; scores and memory
    carry over, so several calls equal one if their boundaries fall on chunk boundaries.
    Decoded tokens belong to the chunk before them.

    Attributes:
        chunks: one record per chunk.
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        local: int,
        heavy: int,
        sinks: int = 0,
        score: Score = "sum",
        window: int = 64,
        decay: float = 1.0,
        by_values: bool = False,
        tail: int = 0,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        if chunk_size < 1 or local < 0 or heavy < 0 or local + heavy == 0:
            raise ValueError("need chunk_size >= 1, local >= 0, heavy >= 0, local + heavy >= 1")
        super().__init__(scale=scale, soft_cap=soft_cap)
        self._chunk_size = chunk_size
        self._sizes = {"local": local, "heavy": heavy, "sinks": sinks}
        self._score = score
        self._window = window
        self._by_values = by_values
        self._tail = tail
        self._column_sums = ColumnSums(decay=0.0 if score == "window" else decay)
        self.chunks: list[ChunkRecord] = []

    @property
    def scores(self) -> Array:
        """[n_kv_heads, n_positions] accumulated column sums s."""
        return self._column_sums.sums

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        """Output [n_heads, n, d] of q [n_heads, n, d] with new rows k, v [n_kv_heads, n, d].

        is_last: the prompt ends here, so that its last chunk adds nothing to the scores.
        """
        first = self.append(k, v)
        self._column_sums.grow(k.shape[0], first + k.shape[1])
        n_sparse = q.shape[1] - min(self._tail if is_last else 0, q.shape[1])
        bounds = chunk_bounds(n_sparse, chunk_size=self._chunk_size)
        parts = [
            self._run_chunk(
                q[:, start:stop],
                first + start,
                first + stop,
                is_scored=not (is_last and stop == n_sparse),
            )
            for start, stop in bounds
        ]
        if n_sparse < q.shape[1]:
            parts.append(self.read_all(q[:, n_sparse:]))
        return np.concatenate(parts, axis=1)

    def _ranks_of(self, head: int) -> Array:
        """[n_positions] scores without norms."""
        is_mean = self._score in ("mean", "lift")
        return self._column_sums.means(head) if is_mean else self._column_sums.sums[head]

    def _scores_of(self, head: int) -> Array:
        """[n_positions] by which `head` chooses."""
        scores = self._ranks_of(head)
        return scores * np.linalg.norm(self.v[head], axis=1) if self._by_values else scores

    def _select(self, n_kv_heads: int, start: int) -> tuple[tuple[Positions, ...], Array]:
        """Memory set of the chunk at `start`; tokens decoded since belong to the chunk before."""
        if start == 0:
            empty = np.zeros(0, dtype=np.int64)
            return (empty,) * n_kv_heads, np.full(n_kv_heads, np.inf)
        last = self.chunks[-1]
        chosen = [
            select_memory(
                self._scores_of(head), last.memory[head], (last.start, start), **self._sizes
            )
            for head in range(n_kv_heads)
        ]
        return tuple(positions for positions, _ in chosen), np.array([gap for _, gap in chosen])

    def _query_weights(self, n_visible: Positions) -> Array:
        """[n] w_i of the queries of a part of which they see `n_visible` keys."""
        n = len(n_visible)
        if self._score == "lift":
            return n_visible.astype(np.float64)
        if self._score == "window":
            return (np.arange(n) >= n - self._window).astype(np.float64)
        return np.ones(n)

    def _run_chunk(self, q: Array, start: int, stop: int, *, is_scored: bool) -> Array:
        n_kv_heads, _, d = self.k.shape
        n = stop - start
        scale = d**-0.5 if self.scale is None else self.scale
        grouped = group_queries(q, n_kv_heads)
        chunk_k, chunk_v = self.k[:, start:stop], self.v[:, start:stop]

        intra, intra_weights = attend(
            grouped,
            chunk_k[:, None],
            chunk_v[:, None],
            scale=scale,
            soft_cap=self.soft_cap,
            visible=np.tri(n, dtype=bool),
        )
        memory, margins = self._select(n_kv_heads, start)
        inter_parts = [
            attend(
                grouped[head],
                self.k[head, positions],
                self.v[head, positions],
                scale=scale,
                soft_cap=self.soft_cap,
            )
            for head, positions in enumerate(memory)
        ]
        inter = SoftmaxState(
            m=np.stack([state.m for state, _ in inter_parts]),
            l=np.stack([state.l for state, _ in inter_parts]),
            o=np.stack([state.o for state, _ in inter_parts]),
        )

        own_weights = self._query_weights(np.arange(1, n + 1))
        intra_sums = np.einsum("hgij,i->hj", intra_weights, own_weights)
        inter_sums = tuple(
            np.einsum("gij,i->j", weights, self._query_weights(np.full(n, len(positions))))
            for positions, (_, weights) in zip(memory, inter_parts, strict=True)
        )
        for head, positions in enumerate(memory if is_scored else ()):
            own = np.arange(start, stop)
            self._column_sums.add(head, own, intra_sums[head], np.arange(n, 0, -1))
            self._column_sums.add(head, positions, inter_sums[head], n)
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
                ranks=np.array([self._ranks_of(head)[:stop] for head in range(n_kv_heads)]),
            )
        )
        return merge(intra, inter).o.reshape(*q.shape[:2], -1)
