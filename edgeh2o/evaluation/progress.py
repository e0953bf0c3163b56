"""How far an evaluation is, for progress bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.session import OnProgress


class Progress:
    """Counts steps, and calls ``on_progress(stage, done, total)`` after each."""

    def __init__(
        self, on_progress: OnProgress | None, total: int, *, stage: str = "evaluate"
    ) -> None:
        self._on_progress = on_progress
        self._stage = stage
        self._total = total
        self._done = 0

    def advance(self, n_steps: int = 1) -> None:
        """``n_steps`` more are done."""
        self._done += n_steps
        if self._on_progress is not None:
            self._on_progress(self._stage, self._done, self._total)


class StepsLeft:
    """So many calls of ``on_step`` for a search that may need fewer."""

    def __init__(self, n_steps: int, on_step: Callable[[], None]) -> None:
        self._n_left = n_steps
        self._on_step = on_step

    def advance(self, n_steps: int = 1) -> None:
        """``n_steps`` more are done."""
        for _ in range(n_steps):
            self._n_left -= 1
            self._on_step()

    def finish(self) -> None:
        """Those that were not needed are done too."""
        self.advance(self._n_left)
