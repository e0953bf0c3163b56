"""How the predictions of a sparse prefill differ from those of a dense one, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..runners.runner_calls import plan_calls

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
        for rows in _blocks(0, len(targets), _COMPARED_ROWS)
    ]
    return join_scores(parts)


def _compare_rows(
    dense: NDArray[np.float32], sparse: NDArray[np.float32], targets: NDArray[np.int32]
) -> TokenScores:
    dense_top, sparse_top = dense.argmax(axis=1), sparse.argmax(axis=1)
    agrees = (dense_top == sparse_top).astype(np.float64)
    dense, sparse = _shift(dense, dense_top), _shift(sparse, sparse_top)
    weights = np.exp(dense)
    dense_sum = weights.sum(axis=1, dtype=np.float64)
    sparse_sum = np.exp(sparse).sum(axis=1, dtype=np.float64)
    dense_log_sum, sparse_log_sum = np.log(dense_sum), np.log(sparse_sum)
    index = np.arange(len(targets))
    dense_nll = dense_log_sum - dense[index, targets]
    sparse_nll = sparse_log_sum - sparse[index, targets]
    # sum p (log p - log q), with the normalisation of both taken out of the sum
    np.subtract(dense, sparse, out=dense)
    weights *= dense
    kl = weights.sum(axis=1, dtype=np.float64) / dense_sum
    return TokenScores(
        dense_nll=dense_nll,
        sparse_nll=sparse_nll,
        kl=kl + (sparse_log_sum - dense_log_sum),
        agrees=agrees,
    )


def _shift(logits: NDArray[np.float32], top: NDArray[np.intp]) -> NDArray[np.float32]:
    """Less those of the likeliest token, ``top`` [n], so that no exponential overflows."""
    return logits - logits[np.arange(len(top)), top, None]


def _score_rows(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    shifted = _shift(logits, logits.argmax(axis=1))
    log_sum: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    return log_sum - shifted[np.arange(len(targets)), targets]


def score_window(
    runner: Runner, window: NDArray[np.int32], *, first: int = 0, **hooks: Any
) -> NDArray[np.float64]:
    """Negative log-probabilities [n - 1 - first] of the tokens of ``window`` [n], in nats.

    Bit for bit those of ``WindowComparer``, for a fraction of the time where no divergence is asked
    for. The runner must have room for the window and ``all_rows``; ``hooks`` are of its
    ``prefill``.
    """
    runner.reset()
    parts = []
    for call in plan_calls(0, len(window), runner):
        runner.prefill(window[call], is_last=call.stop == len(window), **hooks)
        for rows in _scored_rows(call, len(window), first):
            logits = runner.row_logits(rows.start - call.start, rows.stop - rows.start)
            targets = window[rows.start + 1 : rows.stop + 1]
            parts += [
                _score_rows(logits[few], targets[few])
                for few in _blocks(0, len(targets), _COMPARED_ROWS)
            ]
    return np.concatenate(parts)


class WindowComparer:
    """Reads windows of tokens with a dense runner and compares others with it.

    The runners must have room for a window, and equal batch sizes. A window whose scored tokens are
    all in its last batch is read densely once, however many runners are compared on it one after
    another: the last layer stays in the runner.
    """

    def __init__(self, dense: Runner) -> None:
        self._dense = dense
        self._held: NDArray[np.int32] | None = None
        self._held_call = slice(0)

    def score(
        self, window: NDArray[np.int32], *, first: int = 0, **hooks: Any
    ) -> NDArray[np.float64]:
        """Reads ``window`` [n] densely and scores it, as ``score_window``."""
        self._held = None
        nll = score_window(self._dense, window, first=first, **hooks)
        *_, self._held_call = plan_calls(0, len(window), self._dense)
        self._held = window.copy()
        return nll

    def holds(self, window: NDArray[np.int32]) -> bool:
        """Whether the last of what the dense runner has read is of this window."""
        return self._held is not None and np.array_equal(self._held, window)

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
        calls = list(plan_calls(0, n_tokens, sparse))
        is_held = self.holds(window) and self._held_call == calls[-1] and calls[-1].start <= first
        for call in calls:
            if not is_held:
                self._read_densely(window, call)
            sparse.prefill(window[call], is_last=call.stop == n_tokens)
            for rows in _scored_rows(call, n_tokens, first):
                index, n_rows = rows.start - call.start, rows.stop - rows.start
                dense_rows = self._dense.row_logits(index, n_rows)
                sparse_rows = sparse.row_logits(index, n_rows)
                targets = window[rows.start + 1 : rows.stop + 1]
                parts.append(compare_logits(dense_rows, sparse_rows, targets))
            if on_tokens is not None:
                on_tokens(call.stop - call.start)
        return join_scores(parts)

    def _read_densely(self, window: NDArray[np.int32], call: slice) -> None:
        self._held = None
        if call.start == 0:
            self._dense.reset()
        is_last = call.stop == len(window)
        self._dense.prefill(window[call], is_last=is_last)
        if is_last:
            self._held, self._held_call = window.copy(), call


def _scored_rows(call: slice, n_tokens: int, first: int) -> Iterator[slice]:
    """Tokens of a call, from ``first`` on, that have one after them; as many as a block holds."""
    return _blocks(max(call.start, first), min(call.stop, n_tokens - 1), BLOCK_ROWS)


def _blocks(first: int, end: int, size: int) -> Iterator[slice]:
    for start in range(first, end, size):
        yield slice(start, min(start + size, end))
