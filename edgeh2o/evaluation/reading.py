"""Driving a runner by hand: a prompt in batches, as evaluations need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..runners.base import plan_calls

if TYPE_CHECKING:
    from ..runners.base import Runner


def prefill_prompt(runner: Runner, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Forgets the prompt before and reads ``tokens`` [n]; returns the logits after the last."""
    runner.reset()
    logits = None
    for call in plan_calls(0, len(tokens), runner):
        logits = runner.prefill(tokens[call], is_last=call.stop == len(tokens))
    if logits is None:
        raise ValueError("a prompt needs at least one token")
    return logits
