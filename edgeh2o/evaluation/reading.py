"""Driving a runner by hand: a prompt in batches, as evaluations need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..runners.base import Runner


def read_prompt(runner: Runner, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Forgets the prompt before and reads ``tokens`` [n]; returns the logits after the last."""
    runner.reset()
    logits = None
    for first in range(0, len(tokens), runner.batch_size):
        batch = tokens[first : first + runner.batch_size]
        logits = runner.prefill(batch, is_last=first + len(batch) == len(tokens))
    if logits is None:
        raise ValueError("a prompt needs at least one token")
    return logits
