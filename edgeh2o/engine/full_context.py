"""What goes on being read once an answer has filled the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..runners.base import plan_calls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import Runner

# A shorter context would be read again every few tokens.
LEAST_CONTEXT = 64


def check_shift(max_context: int) -> None:
    """Raises UsageError for a context of so many positions that is too short to go on past."""
    if max_context < LEAST_CONTEXT:
        raise UsageError(
            f"a context of {max_context} positions is too short to go on past its end "
            f"(--context-full shift); use -c {LEAST_CONTEXT} or more"
        )


def choose_kept(tokens: NDArray[np.int32], n_prompt: int) -> NDArray[np.int32]:
    """Of the ``tokens`` [n] of a full context, about half.

    The beginning of the prompt, which says what is to be done, but no more than an eighth, and the
    latest ones.
    """
    n_kept = max(1, len(tokens) // 2)
    n_first = min(n_prompt, len(tokens) // 8)
    return np.concatenate([tokens[:n_first], tokens[len(tokens) - (n_kept - n_first) :]])


def shift_context(
    runner: Runner, n_prompt: int, batch_size: int, *, stays_open: bool
) -> NDArray[np.int32]:
    """Reads the kept half again, from position 0; returns its tokens.

    The cache then holds what it would after a prompt of these tokens: nothing that was dropped
    leaves a trace in keys or values, and every kind of cache and of layer can do it.
    """
    kept = choose_kept(np.asarray(runner.token_ids, np.int32), n_prompt)
    runner.reset()
    for call in plan_calls(0, len(kept), runner, batch_size):
        runner.prefill(kept[call], is_last=call.stop == len(kept), stays_open=stays_open)
    return kept
