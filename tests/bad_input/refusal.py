"""Runs the command line on bad input and checks what every refusal has in common."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.host.memory import peak_rss_bytes

# A header is read a MiB at a time; the rest is for the parser's own objects.
MAX_PYTHON_BYTES = 4 * 2**20
MAX_RSS_GROWTH_BYTES = 64 * 2**20
MAX_LINE_LENGTH = 1000


class Refusal:
    """Checks that a command line is refused: ``refusal(arguments, code=1, problem="regex")``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        code: int,
        problem: str,
        max_python_bytes: int = MAX_PYTHON_BYTES,
    ) -> None:
        self._capsys.readouterr()
        with small_memory(max_python_bytes):
            assert main(arguments) == code
        captured = self._capsys.readouterr()
        assert captured.out == ""
        require_one_line(captured.err)
        assert re.search(problem, captured.err)


def require_one_line(stderr: str) -> None:
    """One printable line of bearable length that begins as every error of the program does."""
    assert stderr.startswith("edgeh2o: error: ")
    assert stderr.endswith("\n")
    line = stderr[:-1]
    assert line.isprintable()
    assert len(line) < MAX_LINE_LENGTH


@contextmanager
def small_memory(max_python_bytes: int) -> Iterator[None]:
    """Checks the peak of Python's and NumPy's allocations, and of the whole process."""
    _reset_peak_rss()
    before = peak_rss_bytes()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < max_python_bytes
    assert peak_rss_bytes() - before < MAX_RSS_GROWTH_BYTES


def _reset_peak_rss() -> None:
    """Without it the peak is that of all tests so far, and the check can only be weaker."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
