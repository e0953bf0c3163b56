"""Chunked prefill with a budget for every KV head, of one layer in float64, as it is defined.

Symbols: C_c the positions of chunk c, a the first of them; M_c the memory set that it reads;
b the KV head's budget, None for the whole past.

M_c = [0, a) if b is None or b >= a; else b positions: the first min(n_sinks, b // 4), the last
min(L, b // 2) before a, and those of (M_{c-1} united with C_{c-1}) that have the highest scores;
ties go to the lower position.
Landmarks: every page of positions that lies in [0, a) as a whole, and of which n > 0 positions
are not in M_c, adds one key, their mean key, with their mean value, and ln(n) added to its logit.
Pages have `page_size` positions. Of a past of more than max(max_past // page_size, 32) of them
there are no more pages: before one is added, the first two neighbours of the smallest size that
neighbours share become one.
To the logits of a chunk's landmarks is added min(3, spread s^2 / 2), with s^2 = scale^2 sum_d
E[q_d^2] Var[k_d]: the mean over every 16th query of the chunk and the heads of the group, and the
variance within pages of `page_size` positions, over all those that lie in [0, a).
A head that reads its whole past has none. p_ij are the weights of the one softmax of query i
over M_c, the landmarks and {j in C_c, j <= i}.
Scores: unless chunk c is the prompt's last, for j in M_c and in C_c
    s_j <- decay s_j + sum_i p_ij, over the queries i and the query heads of the group, and
    n_j <- decay n_j + number of queries i of the chunk that see j;
the score is s_j / max(n_j, 32). Heads with b = None have none.
Recall: once a > P, the limit `max_past`, a head with b = None reads no longer [0, a) but whole
pages of 16 positions, or of as many times 2 as [0, a) needs in order to hold at most 2 (P // 16)
(at least 2) complete ones: those of the first min(n_sinks, P // 4) positions, those from that of
the first of the last min(L, P // 2) before a on, and the others with the highest scores, as many
as P has room for; ties go to the lower page. With k_max and k_min the elementwise bounds of a
page's keys, u_ip = scale (max(q_i, 0) . k_max + min(q_i, 0) . k_min) bounds the logits of query i
there; a page's score is the sum over the chunk's queries and the heads of the group of
softmax_p(u_ip)^2, over the pages that are neither of the first nor of the last. The rest gets
landmarks.
Decode: after a prompt of N >= `decode_from` tokens a generated token reads what a chunk at N would
with b + L positions instead of b, of all of [0, N), and all positions from N on; everything if
N <= b + L. With b = None it reads the pages that `choose_pages` of
tests/reference/pages.py gives, of 4 positions and `decode_pages` of them, if every head has not
b = None. Here b is that of `decode_budgets`, if they are given, and the scores are s_j / max(n_j,
32) of
    s_j <- (1 - n / 32) s_j + sum_i p_ij,   n_j <- (1 - n / 32) n_j + n,
p_ij the weights of the causal softmax over all keys, i the last and every second token before it of
every call, n of them, at most 32 of a prompt's last call and 8 of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.reference.dense import CachedLayer, group_queries
from tests.reference.heavy_hitters import ColumnSums, Positions, select_memory
from tests.reference.landmarks import Landmarks, landmark_spread, make_landmarks
from tests.reference.pages import read_pages
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array, attend

# Positions of the smallest page whose keys' bounds a recall goes by.
RECALL_PAGE = 16
# Positions of the pages that generated tokens choose from.
DECODE_PAGE = 4
# Most queries of a call by which positions are judged that generated tokens may read.
SAMPLED_QUERIES = 32


@dataclass(frozen=True, slots=True)
class HeadwiseRecord:
    """What happened in one chunk.

    Attributes:
        start, stop: absolute positions of the chunk, stop exclusive.
        memory: per KV head, the sorted positions that the chunk read besides itself.
        landmarks: per KV head.
        margins: [n_kv_heads] as `select_memory` returns them.
        scores: [n_kv_heads, stop] decayed column sums s after the chunk.
        means: [n_kv_heads, stop] the scores that follow from them.
    """

    start: int
    stop: int
    memory: tuple[Positions, ...]
    landmarks: tuple[Landmarks, ...]
    margins: Array
    scores: Array
    means: Array


def recall_page_size(start: int, max_past: int) -> int:
    """Positions of the pages of the past [0, start) that a recall chooses from."""
    page_size = RECALL_PAGE
    while start // page_size > 2 * max(max_past // RECALL_PAGE, 1):
        page_size *= 2
    return page_size


def score_pages(
    q: Array,
    k: Array,
    pages: Positions,
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None,
) -> Array:
    """[n_pages] scores of `pages` of the rows k [n, d] for the queries q [group, n, d]."""
    rows = k[pages[:, None] * page_size + np.arange(page_size)]
    logits = np.maximum(q, 0) @ rows.max(axis=1).T + np.minimum(q, 0) @ rows.min(axis=1).T
    logits *= scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.square(weights / weights.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))


class HeadwiseLayer(CachedLayer):
    """One layer during one prompt; same face as H2OLayer.

    store: rounds what decode keeps of a prompt: the rows that it reads of it, unless a budget holds
        all of it, and landmarks, [n, d].

    Attributes:
        budgets: b of every KV head.
        chunks: one record per chunk.
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        budgets: Sequence[int | None],
        local: int = 256,
        sinks: int = 4,
        decay: float = 0.9,
        page_size: int = 64,
        spread: float = 0.0,
        max_past: int = 8192,
        tail: int = 0,
        decode_from: int | None = None,
        decode_pages: int = 1024,
        decode_budgets: Sequence[int | None] | None = None,
        store: Callable[[Array], Array] = np.asarray,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(scale=scale, soft_cap=soft_cap)
        self._chunk_size = chunk_size
        self.budgets = tuple(budgets)
        self._local = local
        self._sinks = sinks
        self._page_size = page_size
        self._spread = spread
        self._max_past = max_past
        self._tail = tail
        self._decode_from = decode_from
        self._decode_pages = decode_pages
        self._decode_budgets = tuple(budgets if decode_budgets is None else decode_budgets)
        self._store = store
        self._n_prompt = 0
        self._column_sums = ColumnSums(decay=decay)
        self._sampled = ColumnSums()
        self.chunks: list[HeadwiseRecord] = []

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        """Output [n_heads, n, d] of q [n_heads, n, d] with new rows k, v [n_kv_heads, n, d].

        is_last: the prompt ends here, so that its last chunk adds nothing to the scores.
        """
        first = self.append(k, v)
        self._column_sums.grow(k.shape[0], first + k.shape[1])
        self._sampled.grow(k.shape[0], first + k.shape[1])
        for head, queries in enumerate(group_queries(q, k.shape[0])):
            most = SAMPLED_QUERIES if is_last else SAMPLED_QUERIES // 4
            sampled = np.arange(q.shape[1])[::-2][:most][::-1]
            self._sample(head, queries[:, sampled], first + sampled)
        n_sparse = q.shape[1] - min(self._tail if is_last else 0, q.shape[1])
        parts = [
            self._run_chunk(
                q[:, start:stop],
                first + start,
                first + stop,
                is_scored=not (is_last and stop == n_sparse),
            )
            for start, stop in chunk_bounds(n_sparse, chunk_size=self._chunk_size)
        ]
        if n_sparse < q.shape[1]:
            parts.append(self.read_all(q[:, n_sparse:]))
        self._n_prompt = self.k.shape[1]
        return np.concatenate(parts, axis=1)

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        """Output [n_heads, 1, d] of one token."""
        is_unknown = all(budget is None for budget in self._decode_budgets)
        if is_unknown or self._decode_from is None or self._n_prompt < self._decode_from:
            return super().decode(q, k, v)
        position = self.append(k, v)
        own = np.arange(self._n_prompt, position + 1)
        outputs = []
        for head, queries in enumerate(group_queries(q, self.k.shape[0])):
            members, marks = self.prompt_memory(head)
            positions = np.concatenate([members, own])
            if self._decode_budgets[head] is None and self._decode_pages > 0:
                positions = read_pages(
                    queries[:, 0],
                    self.k[head],
                    self._n_prompt,
                    page_size=DECODE_PAGE,
                    n_kept=self._decode_pages,
                )
            state, _ = attend(
                queries,
                np.concatenate([self._kept(self.k, head, positions), self._store(marks.keys)]),
                np.concatenate([self._kept(self.v, head, positions), self._store(marks.values)]),
                scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
                soft_cap=self.soft_cap,
                biases=np.concatenate([np.zeros(len(positions)), np.log(marks.counts)]),
            )
            outputs.append(state.o)
        return np.concatenate(outputs)

    def prompt_memory(self, head: int) -> tuple[Positions, Landmarks]:
        """What generated tokens read of the prompt."""
        n, budget = self._n_prompt, self._decode_budgets[head]
        rows = self.k[head], self.v[head]
        if budget is None or n <= budget + self._local:
            return np.arange(n), make_landmarks(*rows, np.arange(n), n, page_size=0)
        capacity = budget + self._local
        sinks, local = min(self._sinks, capacity // 4), min(self._local, capacity // 2)
        members, _ = select_memory(
            self._sampled.means(head),
            np.arange(0),
            (0, n),
            local=local,
            heavy=capacity - local - sinks,
            sinks=sinks,
        )
        return members, make_landmarks(
            *rows, members, n, page_size=self._page_size, n_fine=self._max_past
        )

    def _kept(self, rows: Array, head: int, positions: Positions) -> Array:
        """Rows of the cache, those of the prompt rounded where decode has copies of them."""
        budget, rows = self._decode_budgets[head], rows[head][positions]
        if budget is not None and self._n_prompt <= budget + self._local:
            return rows
        is_copied = positions[:, None] < self._n_prompt
        return np.where(is_copied, self._store(rows), rows)

    def _sample(self, head: int, queries: Array, positions: Positions) -> None:
        """Scores of all positions by `queries` [group, n, d] at `positions` [n]."""
        n, end = queries.shape[1], self.k.shape[1]
        _, weights = attend(
            queries,
            self.k[head],
            self.v[head],
            scale=queries.shape[2] ** -0.5 if self.scale is None else self.scale,
            soft_cap=self.soft_cap,
            visible=np.arange(end) <= positions[:, None],
        )
        kept = 1 - n / SAMPLED_QUERIES
        for state, new in (
            (self._sampled.sums, weights.sum(axis=(0, 1))),
            (self._sampled.ages, n),
        ):
            state[head] = kept * state[head] + new

    def _recall(self, head: int, queries: Array, start: int) -> tuple[Positions, float]:
        """What a head with a long past reads for `queries` [group, n, d], and the margin."""
        limit = self._max_past
        page_size = recall_page_size(start, limit)
        local_page = (start - min(self._local, limit // 2)) // page_size
        n_sink_pages = min(-(-min(self._sinks, limit // 4) // page_size), local_page)
        local = np.arange(local_page * page_size, start)
        room = max(0, limit - n_sink_pages * page_size - len(local)) // page_size
        pages = np.arange(n_sink_pages, local_page)
        margin = np.inf
        if room < len(pages):
            scale = self.k.shape[2] ** -0.5 if self.scale is None else self.scale
            scores = score_pages(
                queries,
                self.k[head],
                pages,
                page_size=page_size,
                scale=scale,
                soft_cap=self.soft_cap,
            )
            order = np.lexsort((pages, -scores))
            if room > 0:
                margin = float(scores[order[room - 1]] - scores[order[room]])
            pages = np.sort(pages[order[:room]])
        pages = np.concatenate([np.arange(n_sink_pages), pages])
        chosen = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        return np.concatenate([chosen, local]), margin

    def _select(self, head: int, queries: Array, start: int) -> tuple[Positions, float]:
        """Memory set and margin of the chunk at `start`."""
        budget = self.budgets[head]
        if budget is None and 0 < self._max_past < start:
            return self._recall(head, queries, start)
        if budget is None or budget >= start:
            return np.arange(start), np.inf
        sinks, local = min(self._sinks, budget // 4), min(self._local, budget // 2)
        last = self.chunks[-1]
        return select_memory(
            self._column_sums.means(head),
            last.memory[head],
            (last.start, start),
            local=local,
            heavy=budget - local - sinks,
            sinks=sinks,
        )

    def _run_chunk(self, q: Array, start: int, stop: int, *, is_scored: bool) -> Array:
        n_kv_heads, _, d = self.k.shape
        own = np.arange(start, stop)
        outputs, memory, landmarks, margins = [], [], [], []
        for head, queries in enumerate(group_queries(q, n_kv_heads)):
            k, v, budget = self.k[head], self.v[head], self.budgets[head]
            members, margin = self._select(head, queries, start)
            marks = make_landmarks(
                k, v, members, start, page_size=self._page_size, n_fine=self._max_past
            )
            # One softmax; nobody waits for a landmark.
            positions = np.concatenate([members, own, np.full(len(marks.counts), -1)])
            n_read = len(members) + len(own)
            scale = d**-0.5 if self.scale is None else self.scale
            size, part = self._page_size, self._spread
            spread = landmark_spread(queries, k, start, page_size=size, scale=scale, spread=part)
            state, weights = attend(
                queries,
                np.concatenate([k[positions[:n_read]], marks.keys]),
                np.concatenate([v[positions[:n_read]], marks.values]),
                scale=scale,
                soft_cap=self.soft_cap,
                visible=positions[None, :] <= own[:, None],
                biases=np.concatenate([np.zeros(n_read), np.log(marks.counts) + spread]),
            )
            sums = weights.sum(axis=(0, 1))
            if is_scored and budget is not None:
                self._column_sums.add(head, members, sums[: len(members)], len(own))
                n_seen = np.arange(len(own), 0, -1)
                self._column_sums.add(head, own, sums[len(members) : n_read], n_seen)
            outputs.append(state.o)
            memory.append(members)
            landmarks.append(marks)
            margins.append(margin)
        self.chunks.append(
            HeadwiseRecord(
                start=start,
                stop=stop,
                memory=tuple(memory),
                landmarks=tuple(landmarks),
                margins=np.array(margins),
                scores=self._column_sums.sums[:, :stop].copy(),
                means=np.array(
                    [self._column_sums.means(head)[:stop] for head in range(n_kv_heads)]
                ),
            )
        )
        return np.concatenate(outputs)
