"""``edgeh2o pull``: brings a model into a cache folder."""

from __future__ import annotations

import argparse

from ..errors import ResourceError, UsageError
from .report import printable

HELP = "fetch a known model, or one of the Hugging Face Hub"
DESCRIPTION = (
    "Fetch a model and print its path: a known model into the cache folder, or org/name[:file] of "
    "the Hugging Face Hub, which may be an address, into that library's cache (needs "
    "edgeh2o[pull]). FILE is a GGUF file, or a part of its name such as Q4_K_M; without GGUF files "
    "the folder of safetensors is fetched."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument(
        "name", metavar="NAME", help="known model, such as smollm2-135m, or org/name[:file]"
    )


def execute(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it lies."""
    from ..formats.hub import pull_from_hub, read_hub_name
    from ..formats.known_models import KNOWN_MODELS
    from ..formats.metadata import quote
    from ..formats.model_cache import is_local_model, resolve_model
    from .model_options import print_note

    if not args.name:
        raise UsageError(
            "no name given: pull a known model, such as smollm2-135m, or org/name[:file]"
        )
    known = args.name in KNOWN_MODELS
    if not known and is_local_model(args.name):
        print_note(f"{printable(args.name)} is on this machine already")
        print(args.name)
    elif known:
        print(resolve_model(args.name, on_message=print_note))
    elif (name := read_hub_name(args.name)) is not None:
        print(pull_from_hub(name, on_message=print_note))
    else:
        raise ResourceError(
            f"{quote(args.name)} is not the name of a known model ({', '.join(KNOWN_MODELS)}), "
            "nor of the form org/name[:file] of the Hugging Face Hub, nor a model on this machine"
        )
    return 0
