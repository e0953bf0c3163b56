"""``edgeh2o pull``: brings a model into a cache folder."""

from __future__ import annotations

import argparse

HELP = "fetch a known model, or one of the Hugging Face Hub"
DESCRIPTION = (
    "Fetch a model and print its path: a known model into the cache folder, or org/name[:file] of "
    "the Hugging Face Hub into that library's cache (needs edgeh2o[pull]). FILE is a GGUF file, or "
    "a part of its name such as Q4_K_M; without GGUF files the folder of safetensors is fetched."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument(
        "name", metavar="NAME", help="known model, such as smollm2-135m, or org/name[:file]"
    )


def execute(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it lies."""
    from ..formats.hub import is_hub_name, pull_from_hub
    from ..formats.model_cache import resolve_model
    from .model_options import print_note

    if is_hub_name(args.name):
        path = pull_from_hub(args.name, on_message=print_note)
    else:
        path = resolve_model(args.name, on_message=print_note)
    print(path)
    return 0
