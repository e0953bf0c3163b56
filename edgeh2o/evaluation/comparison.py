"""How the predictions of a sparse prefill differ from those of a dense one, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..runners.base import plan_calls

if TYPE_CHECKING:
    from ..runners.base import Runner

# Rows whose logits are computed at a time: enough for a fast matrix product, and for a vocabulary
# of 150,000 still under 80 MB.
BLOCK_ROWS = 128
# Rows that are compared at a time, so that the intermediate arrays stay in the cache.
_COMPARED_ROWS = 4


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """One entry per predicted token, float64 arrays [n].

    ``dense_nll`` and ``sparse_nll`` are negative log-probabilities of the true token and ``kl`` is
    KL(dense || sparse), all in nats; ``agrees`` is 1 where both find the same token most likely.
    """

    dense_nll: NDArray[np.float64]
    sparse_nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    agrees: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kl)

    def part(self, first: int, last: int) -> TokenScores:
        """The entries [first, last)."""
        return TokenScores(*(getattr(self, item.name)[first:last] for item in fields(self)))


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """The entries of all ``parts``, one after another."""
    return TokenScores(
        *(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(parts[0]))
    )


def standard_error(values: NDArray[np.float64]) -> float:
    """That of the mean of ``values`` [n]; NaN for fewer than two, which tell nothing of it."""
    n = len(values)
    return float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


def estimate_loss(differences: NDArray[np.float64]) -> tuple[float, float]:
    """How much larger the perplexity is, and the standard error of that, in percent.

    ``differences`` [n] are those of the negative log-probabilities, sparse less dense.
    """
    ratio = float(np.exp(differences.mean()))
    return 100 * (ratio - 1), 100 * ratio * standard_error(differences)


def compare_logits(
    dense: NDArray[np.float32], sparse: NDArray[np.float32], targets: NDArray[np.int32]
) -> TokenScores:
    """Compares logits [n, vocab_size] of the same positions; ``targets`` [n] are the true tokens.

    Exponentials are taken in float32 and summed in float64.
    """
    parts = [
        _compare_rows(dense[rows], sparse[rows], targets[rows])
        for rows in _blocks(len(targets), _COMPARED_ROWS)
    ]
    return join_scores(parts)


def _compare_rows(
    dense: NDArray[np.float32], sparse: NDArray[np.float32], targets: NDArray[np.int32]
) -> TokenScores:
    index = np.arange(len(targets))
    dense_top, sparse_top = dense.argmax(axis=1), sparse.argmax(axis=1)
    dense = dense - dense[index, dense_top, None]
    sparse = sparse - sparse[index, sparse_top, None]
    dense_nll, sparse_nll = -dense[index, targets], -sparse[index, targets]
    weights = np.exp(dense)
    dense_sum = weights.sum(axis=1, dtype=np.float64)
    sparse_sum = np.exp(sparse).sum(axis=1, dtype=np.float64)
    # sum p (log p - log q), with the normalisation of both taken out of the sum
    np.subtract(dense, sparse, out=dense)
    weights *= dense
    kl = weights.sum(axis=1, dtype=np.float64) / dense_sum
    dense_log_sum, sparse_log_sum = np.log(dense_sum), np.log(sparse_sum)
    return TokenScores(
        dense_nll=dense_log_sum + dense_nll,
        sparse_nll=sparse_log_sum + sparse_nll,
        kl=kl + (sparse_log_sum - dense_log_sum),
        agrees=(dense_top == sparse_top).astype(np.float64),
    )


class WindowComparer:
    """Reads windows of tokens with a dense runner and compares others with it.

    The runners must have room for a window, and equal batch sizes. A window that fits in one
    batch is read densely once, however many runners are compared on it: its last layer stays
    in the runner.
    """

    def __init__(self, dense: Runner) -> None:
        self._dense = dense
        self._held: NDArray[np.int32] | None = None

    def compare(
        self,
        sparse: Runner,
        window: NDArray[np.int32],
        *,
        first: int = 0,
        on_tokens: Callable[[int], None] | None = None,
    ) -> TokenScores:
        """Scores of the predicted tokens of ``window`` [n], its last n - 1, from ``first`` on.

        ``on_tokens(n)`` is called after every batch with the number of tokens in it.
        """
        sparse.reset()
        parts = []
        n_tokens = len(window)
        for rows in plan_calls(0, n_tokens, sparse):
            batch, is_last = window[rows], rows.stop == n_tokens
            self._read_densely(window, rows, is_last=is_last)
            sparse.prefill(batch, is_last=is_last)
            targets = window[rows.start + 1 : rows.stop + 1]
            n_skipped = min(max(0, first - rows.start), len(targets))
            for rest in _blocks(len(targets) - n_skipped, BLOCK_ROWS):
                block = slice(rest.start + n_skipped, rest.stop + n_skipped)
                n_rows = block.stop - block.start
                dense_rows = self._dense.row_logits(block.start, n_rows)
                sparse_rows = sparse.row_logits(block.start, n_rows)
                parts.append(compare_logits(dense_rows, sparse_rows, targets[block]))
            if on_tokens is not None:
                on_tokens(len(batch))
        return join_scores(parts)

    def _read_densely(self, window: NDArray[np.int32], rows: slice, *, is_last: bool) -> None:
        is_whole = rows.start == 0 and is_last
        if is_whole and self._held is not None and np.array_equal(self._held, window):
            return
        self._held = None
        if rows.start == 0:
            self._dense.reset()
        self._dense.prefill(window[rows], is_last=is_last)
        if is_whole:
            self._held = window.copy()


def _blocks(n: int, size: int) -> Iterator[slice]:
    for first in range(0, n, size):
        yield slice(first, min(first + size, n))
