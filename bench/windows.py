"""Options that scripts have in common which measure windows of texts of several kinds."""

from __future__ import annotations

import argparse

from edgeh2o.cli.evaluation_options import list_of
from edgeh2o.host.threads import default_thread_count

from .reporting import existing_file


def add_window_options(
    parser: argparse.ArgumentParser,
    *,
    ctx: int,
    kinds: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0,),
) -> None:
    """The model, the windows, threads and output; with these defaults, no ``kinds`` for all."""
    parser.add_argument("model", type=existing_file, metavar="MODEL")
    parser.add_argument("--ctx", type=int, default=ctx, help="tokens of a window")
    shown = ",".join(kinds) or "all"
    parser.add_argument("--kinds", type=list_of(str), default=kinds, help=f"default: {shown}")
    parser.add_argument("--text-seeds", type=list_of(int), default=seeds)
    parser.add_argument("-t", "--threads", type=int, default=default_thread_count())
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
