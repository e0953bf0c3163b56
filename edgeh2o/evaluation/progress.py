"""How far an evaluation is, for progress bars."""

from __future__ import annotations

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
        self._report()

    def skip(self, n_steps: int) -> None:
        """``n_steps`` fewer are needed than was thought."""
        self._total -= n_steps
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._stage, self._done, self._total)


class Steps:
    """So many steps of a ``Progress``, of ``size`` each, for a search that may need fewer."""

    def __init__(self, progress: Progress, n_steps: int, *, size: int = 1) -> None:
        self._progress = progress
        self._size = size
        self._n_left = n_steps * size

    def advance(self, n_steps: int = 1) -> None:
        """``n_steps`` more are done."""
        self.advance_parts(n_steps * self._size)

    def advance_parts(self, n_parts: int) -> None:
        """As many steps as ``n_parts`` of their ``size`` make."""
        self._n_left -= n_parts
        self._progress.advance(n_parts)

    def finish(self) -> None:
        """Those that are left are not needed."""
        if self._n_left:
            self._progress.skip(self._n_left)
            self._n_left = 0
