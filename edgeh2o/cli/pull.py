"""``edgeh2o pull``: brings a model into a cache folder."""

from __future__ import annotations

import argparse

from ..errors import UsageError
from .report import printable

HELP = "fetch a known model, or one of the Hugging Face Hub"
DESCRIPTION = (
    "Fetch a model and print its path: a known model into the cache folder, or org/name[:file] of "
    "the Hugging Face Hub, which may be an address, into that library's cache (needs "
    "edgeh2o[pull]). FILE is a GGUF file, or a part of its name such as Q4_K_M; without GGUF files "
    "the folder of safetensors is fetched."
)
EXAMPLES = """\
  edgeh2o pull smollm2-135m
  edgeh2o pull org/name:Q4_K_M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument(
        "name", metavar="NAME", help="known model, such as smollm2-135m, or org/name[:file]"
    )


def execute(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it lies."""
    from ..formats.known_models import KNOWN_MODELS
    from ..formats.model_cache import is_local_model, pull
    from .leaving import leaving_on_signals
    from .model_options import print_note

    if not args.name:
        raise UsageError(
            "no name given: pull a known model, such as smollm2-135m, or org/name[:file]"
        )
    if args.name not in KNOWN_MODELS and is_local_model(args.name):
        print_note(f"{printable(args.name)} is on this machine already")
        print(args.name)
    else:
        with leaving_on_signals():
            path = pull(args.name, on_message=print_note)
        print(path)
    return 0
