"""How results are written: Markdown tables, CSV, JSON, and the machine that they come from."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .._version import __version__
from ..host.machine import cpu_model


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
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "edgeh2o": __version__,
    }


def format_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Records of the same plain fields as CSV with a header, without a final newline.

    What is not known (None, NaN) is an empty field.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_without_nan(records))
    return text.getvalue().removesuffix("\n")


def format_json(report: Mapping[str, Any]) -> str:
    """One JSON object: the report and the machine; what is not known (NaN) is null."""
    values = _without_nan({"machine": describe_machine(), **report})
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)


def _without_nan(value: Any) -> Any:
    """Plain values with None for every number that is not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def format_count(count: int, noun: str) -> str:
    """``1 window``, ``1,200 windows``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_estimate(value: float, error: float, digits: int = 2, sign: str = "") -> str:
    """``value +- standard error``; ``sign="+"`` shows the sign of positive values too.

    An error that is not known (NaN) is shown as ``-``.
    """
    shown = f"{error:.{digits}f}" if math.isfinite(error) else "-"
    return f"{value:{sign},.{digits}f} +- {shown}"
