"""How far a long work is, on stderr: bars on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

LINE_INTERVAL_S = 10.0
_LEAST_COLUMNS = 64  # of a terminal with a bar: it would take several lines of a narrower one
_TITLES = {
    "load": "Loading the model",
    "prefill": "Reading the prompt",
    "evaluate": "Evaluating",
    "calibrate": "Calibrating",
    "quantise": "Writing the model",
}
_IN_BYTES = ("load", "quantise")
# Their steps are no tokens, and there may be fewer of them than it first seems.
_SEARCHES = ("calibrate",)


class ProgressBars:
    """Called as ``bars(stage, done, total)``; one bar per stage, each removed by the next.

    With ``in_lines`` there are no bars, but a line at most every ``LINE_INTERVAL_S`` seconds.
    """

    def __init__(self, *, is_shown: bool, in_lines: bool = False) -> None:
        self._is_shown = is_shown
        self._in_lines = in_lines
        self._last_line_s = self._begin_s = time.monotonic()
        self._stage: str | None = None
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._is_shown:
            return
        if self._in_lines:
            if stage != self._stage:
                self._stage, self._begin_s = stage, time.monotonic()
            if time.monotonic() - self._last_line_s >= LINE_INTERVAL_S:
                self._last_line_s = time.monotonic()
                line = f"{_TITLES[stage]}: {done / max(1, total):.0%}"
                if stage in _SEARCHES and done:
                    elapsed_s = self._last_line_s - self._begin_s
                    line += f", at most {format_minutes(elapsed_s * (total - done) / done)} left"
                print(line, file=sys.stderr, flush=True)
            return
        if stage != self._stage:
            self.close()
            self._open(stage, total)
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def _open(self, stage: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), _rate_column())
        if stage in _IN_BYTES:
            counts = (DownloadColumn(),)
        elif stage in _SEARCHES:
            counts = (TaskProgressColumn(),)
        columns: tuple[ProgressColumn, ...] = (BarColumn(), *counts, TimeRemainingColumn())
        if console.width < _LEAST_COLUMNS:
            columns = (TaskProgressColumn(),)
        self._bars = Progress(
            TextColumn("{task.description}"), *columns, console=console, transient=True
        )
        self._bars.start()
        self._task = self._bars.add_task(_TITLES[stage], total=total)
        self._stage = stage

    def close(self) -> None:
        """Removes the bar, so that text can follow."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._task = None
        self._stage = None


def format_minutes(seconds: float) -> str:
    """As "5 min", or in hours where there are many."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _rate_column() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed_s = task.elapsed or 0.0
            rate = f"{task.completed / elapsed_s:,.0f} tokens/s" if elapsed_s else ""
            return Text(rate)

    return RateColumn()


def progress_on_stderr(*, quiet: bool) -> ProgressBars:
    """What suits stderr; nothing where ``quiet`` is asked for."""
    return ProgressBars(is_shown=not quiet, in_lines=not sys.stderr.isatty())
