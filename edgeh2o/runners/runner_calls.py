"""What is done with any runner: calls laid out, marks set, and what only some kinds can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from .base import HiddenRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import HiddenRunner, Runner


def keep_hidden(runner: Runner, rows: HiddenRows | None) -> None:
    """Lets calls leave these rows from now on, or none. ValueError for layers there are not."""
    if not hasattr(runner, "keeps_hidden"):
        return
    chosen = rows or HiddenRows()
    shown = cast("HiddenRunner", runner)
    shown.hidden_layers = list(chosen.layers)
    shown.keeps_last_hidden = chosen.is_last_only
    shown.keeps_hidden = rows is not None


def n_evicted(runner: Runner) -> int:
    """Tokens that were dropped from the cache of any runner."""
    return int(getattr(runner, "n_evicted", 0))


def use_small_pages(runner: Runner) -> None:
    """Before its first token: rows take memory as they are written, where the runner can do so."""
    use = getattr(runner, "use_small_pages", None)
    if use is not None:
        use()


def free_positions(runner: Runner) -> int:
    """Tokens that the cache has room for."""
    return runner.max_context + n_evicted(runner) - runner.position


def attention_error(sums: NDArray[np.float64]) -> float | None:
    """The norm of what the attention is wrong by, relative to its output: of ``error_sums``.

    The root of the mean over the layers that were measured; None if none was.
    """
    difference, dense = sums.T
    measured = dense > 0
    if not measured.any():
        return None
    return math.sqrt(float((difference[measured] / dense[measured]).mean()))


def mark_where_due(runner: Runner) -> None:
    """Notes where a later prompt may begin to differ, or an interrupt go back to.

    The further in, the further apart: a mark takes about a fortieth of the cache's memory.
    """
    position = runner.position
    last = runner.find_mark(max(1, runner.prefill_end) - 1)
    if 4 * (position - last) >= position > 0:
        runner.mark()


def plan_calls(first: int, end: int, runner: Runner, batch: int | None = None) -> Iterator[slice]:
    """The ``prefill`` calls that read tokens [first, end): full batches, and what is left.

    ``batch`` is that of the runner, or a smaller multiple of its chunk.

    The last call gets a chunk at least, from the one before, where a batch has several: the last
    tokens of a prompt may read everything, but only as far as their call reaches back.
    """
    batch, chunk = batch or runner.batch_size, runner.chunk_size
    while first < end:
        stop = min(first + batch, end)
        if 0 < end - stop < chunk < batch:
            stop -= chunk
        yield slice(first, stop)
        first = stop
