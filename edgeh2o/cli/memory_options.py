"""``--memory-profile``: the memory of a run over time, written next to its answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import PrefillConfig
from .options import read_config

if TYPE_CHECKING:
    from ..host.memory_profile import MemoryProfile


def add_memory_profile_option(group: argparse._ActionsContainer) -> None:
    """Adds ``--memory-profile FILE``."""
    group.add_argument(
        "--memory-profile",
        type=Path,
        metavar="FILE",
        help="write memory over time by phase to FILE.csv or FILE.json, and with edgeh2o[plot] a "
        "picture beside it",
    )


@contextmanager
def watch_memory(args: argparse.Namespace) -> Iterator[MemoryProfile | None]:
    """A running profile when one was asked for. Raises UsageError for a name that cannot be."""
    if args.memory_profile is None:
        yield None
        return
    from ..host.memory_profile import MemoryProfile, check_profile_path

    check_profile_path(args.memory_profile)
    with MemoryProfile(batch_size=read_config(args, PrefillConfig).batch_size) as profile:
        yield profile


def write_memory_profile(
    profile: MemoryProfile | None, args: argparse.Namespace, allocated: Mapping[str, int]
) -> None:
    """Writes the profile's file and, where matplotlib is installed, its picture."""
    if profile is None:
        return
    profile.write(args.memory_profile, allocated)
    if find_spec("matplotlib") is not None:
        from ..evaluation.figures import draw_memory_profile

        draw_memory_profile(profile, allocated, args.memory_profile.with_suffix(".png"))
