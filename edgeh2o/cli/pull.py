"""``edgeh2o pull``: brings a known model into the cache folder."""

from __future__ import annotations

import argparse
import sys

HELP = "fetch a known model into the cache folder"
DESCRIPTION = "Fetch a known model into the cache folder and print its path."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument("name", metavar="NAME", help="name of the model, such as smollm2-135m")


def execute(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it lies."""
    from ..formats.pull import resolve_model

    path = resolve_model(args.name, on_message=_print_message)
    print(path)
    return 0


def _print_message(message: str) -> None:
    print(message, file=sys.stderr)
