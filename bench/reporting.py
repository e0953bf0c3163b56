"""Markdown tables, JSON files, medians, and how a script ends."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeh2o import __version__
from edgeh2o.errors import EdgeH2OError

from .errors import LlamaCppError


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; columns after the first are aligned to the right."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [cells[0], rules, *cells[1:]]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_samples(samples: Sequence[float], digits: int = 0) -> str:
    """``median (lowest to highest)``."""
    median, low, high = statistics.median(samples), min(samples), max(samples)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge a number: processor, cores, system, version."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "edgeh2o": __version__,
    }


def write_report(output: str, tables: Sequence[str], records: Any) -> None:
    """Prints the tables, or one JSON object with the machine and the ``records``."""
    if output == "json":
        print(json.dumps({"machine": describe_machine(), "results": records}, indent=1))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, edgeh2o {machine['edgeh2o']}\n")
    print("\n\n".join(tables))


def existing_file(text: str) -> Path:
    """An argparse type: the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def print_progress(message: str) -> None:
    """One line on stderr, so that stdout stays the report."""
    print(message, file=sys.stderr, flush=True)


def run_script(main: Callable[[], int]) -> None:
    """Ends the process with the code of ``main``; a known error becomes one line and code 1."""
    try:
        sys.exit(main())
    except (EdgeH2OError, LlamaCppError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: error: {error}")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
