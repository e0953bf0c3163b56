"""``edgeh2o doctor``: what this machine offers and what edgeh2o makes of it."""

from __future__ import annotations

import argparse
from typing import Any

from .report import add_json_option, print_report


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the main parser."""
    parser = verbs.add_parser(
        "doctor",
        help="show what this machine offers: CPU, threads, memory, heat",
        description="Show the CPU and its features, the kernels and the number of threads that "
        "are chosen and why, limits, memory, temperature and versions.",
        allow_abbrev=False,
    )
    add_json_option(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Prints the report."""
    from ..engine.machine import examine_machine

    print_report(examine_machine(), as_json=args.json)
    return 0
