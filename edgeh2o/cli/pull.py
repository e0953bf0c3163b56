"""``edgeh2o pull``: brings a known model into the cache folder."""

from __future__ import annotations

import argparse

HELP = "fetch a known model into the cache folder"
DESCRIPTION = "Fetch a known model into the cache folder and print its path."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument("name", metavar="NAME", help="name of the model, such as smollm2-135m")


def execute(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it lies."""
    from ..formats.model_cache import resolve_model
    from .model_options import print_note

    path = resolve_model(args.name, on_message=print_note)
    print(path)
    return 0
