"""Progress and reads that are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o.evaluation.progress import Progress, Steps


class Counted:
    """How much of ``total`` a ``progress`` said to be done, and how much there is after all."""

    def __init__(self, total: int = 0) -> None:
        self.done, self.total = 0, total
        self.progress = Progress(self._note, total)

    def steps(self, n_steps: int) -> Steps:
        """Of the progress."""
        return Steps(self.progress, n_steps)

    def _note(self, stage: str, done: int, total: int) -> None:
        self.done, self.total = done, total


class CountingRunner:
    """A runner that notes the length of every prefill call."""

    def __init__(self, runner: object, reads: list[int]) -> None:
        self._runner = runner
        self._reads = reads

    def prefill(self, tokens: NDArray[np.int32], **options: Any) -> object:
        self._reads.append(len(tokens))
        return self._runner.prefill(tokens, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)
