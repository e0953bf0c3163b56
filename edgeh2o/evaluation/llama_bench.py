"""Reads what ``llama-bench -o csv`` wrote, to draw it beside our own numbers."""

from __future__ import annotations

import csv
from pathlib import Path

from ..errors import UsageError
from .reporting import format_count


def read_llama_bench(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(prompt length, tokens/s) of the prefill tests, by a label of the settings that differ.

    Raises UsageError for a file that cannot be read or holds no prefill test.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                if int(row["n_prompt"]) > 0 and int(row["n_gen"]) == 0:
                    flash = "on" if row["flash_attn"] in ("1", "true", "on") else "off"
                    threads = format_count(int(row["n_threads"]), "thread")
                    label = f"llama.cpp fa {flash}, {threads}"
                    point = (int(row["n_prompt"]), float(row["avg_ts"]))
                    series.setdefault(label, []).append(point)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} is not what 'llama-bench -o csv' writes: {error!r}") from None
    if not series:
        raise UsageError(f"{path} holds no prefill test (n_prompt > 0, n_gen = 0)")
    return {label: sorted(points) for label, points in series.items()}
