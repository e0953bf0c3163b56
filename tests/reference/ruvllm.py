"""The rule of ruvllm_sparse_attention, of one layer in float64, as it is defined.

Query i reads the tokens [i - W, i], those of the first g that lie before, and i - 2^m for m = 0, 1,
... while that is not negative; and landmarks, the mean key and the mean value of blocks of B
tokens: of the a = (i + 1) // B complete ones those at a - 1, a - 2 and a - 1 - 2^m. One softmax
over both; a landmark counts as one token, whether its tokens are read or not.
A chunk of several tokens reads what its first token would of what lies before it, and itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.reference.dense import CachedLayer, group_queries
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array, attend

Numbers = NDArray[np.int64]


def read_tokens(i: int, *, window: int, globals: int, strides: bool = True) -> Numbers:
    """What query i reads, itself included, ascending."""
    tokens = {*range(max(0, i - window), i + 1), *range(min(globals, i + 1))}
    if strides:
        tokens |= {i - 2**m for m in range(i.bit_length() + 1) if 2**m <= i}
    return np.array(sorted(tokens))


def read_landmarks(i: int, *, block_size: int, strides: bool = True) -> Numbers:
    """The blocks whose landmarks query i reads, ascending."""
    last = (i + 1) // block_size - 1
    if last < 0:
        return np.array([], int)
    blocks = {last, max(0, last - 1)}
    if strides:
        blocks |= {last - 2**m for m in range(last.bit_length() + 1) if 2**m <= last}
    return np.array(sorted(blocks))


class RuvllmLayer(CachedLayer):
    """One layer, chunk by chunk."""

    def __init__(
        self,
        *,
        chunk_size: int,
        window: int = 128,
        block_size: int = 64,
        globals: int = 1,
        strides: bool = True,
        landmarks: bool = True,
    ) -> None:
        super().__init__()
        self._chunk_size = chunk_size
        self._tokens = {"window": window, "globals": globals, "strides": strides}
        self._blocks = {"block_size": block_size, "strides": strides} if landmarks else None

    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array:
        first = self.append(k, v)
        bounds = chunk_bounds(q.shape[1], chunk_size=self._chunk_size)
        return np.concatenate(
            [self._read(q[:, start:stop], first + start) for start, stop in bounds], axis=1
        )

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        return self._read(q, self.append(k, v))

    def _read(self, q: Array, start: int) -> Array:
        """Output [n_heads, n, d] of a chunk at ``start``."""
        stop = start + q.shape[1]
        tokens = np.append(
            read_tokens(start, **self._tokens)[:-1],
            np.arange(start, stop),  # type: ignore[arg-type]
        )
        # Of a prompt's beginning there is nothing before.
        is_first = start == 0 and q.shape[1] > 0
        blocks = (
            np.array([], int)
            if self._blocks is None or is_first
            else read_landmarks(start, **self._blocks)  # type: ignore[arg-type]
        )
        visible = np.arange(start, stop)[:, None] >= tokens[None, :]
        visible = np.concatenate([visible, np.ones((len(visible), len(blocks)), bool)], axis=1)
        outputs = []
        for head, queries in enumerate(group_queries(q, self.k.shape[0])):
            keys, values = (
                np.concatenate([rows[tokens], *self._means(rows, blocks)])
                for rows in (self.k[head], self.v[head])
            )
            state, _ = attend(
                queries,
                keys,
                values,
                scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
                visible=visible,
                soft_cap=self.soft_cap,
            )
            outputs.append(state.o)
        return np.concatenate(outputs)

    def _means(self, rows: Array, blocks: Numbers) -> list[Array]:
        size = self._blocks["block_size"] if self._blocks else 1
        return [rows[block * size : (block + 1) * size].mean(axis=0)[None] for block in blocks]
