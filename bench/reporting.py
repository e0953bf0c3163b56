"""What the scripts print, and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeh2o.errors import EdgeH2OError
from edgeh2o.evaluation.reporting import describe_machine

from .errors import LlamaCppError


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
