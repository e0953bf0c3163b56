"""``edgeh2o doctor``: what this machine offers and what edgeh2o makes of it."""

from __future__ import annotations

import argparse

from .report import add_json_option, print_report

HELP = "show what this machine offers: CPU, threads, memory, heat"
DESCRIPTION = (
    "Show the CPU and its features, the kernels and the number of threads that "
    "are chosen and why, limits, memory, temperature and versions."
)
EXAMPLES = """\
  edgeh2o doctor
  edgeh2o doctor --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Prints the report."""
    from ..host.machine import examine_machine

    print_report(examine_machine(), as_json=args.json)
    return 0
