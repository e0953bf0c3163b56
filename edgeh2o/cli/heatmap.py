"""``edgeh2o heatmap``: which positions each layer and head keeps."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ..formats.atomic_file import check_writable
from .evaluation_options import (
    add_context_option,
    add_evaluation_options,
    add_inputs,
    evaluate_windows,
    list_of,
    print_results,
    read_inputs,
)

HELP = "draw which positions each layer and head keeps"
DESCRIPTION = (
    "Draw which positions of a text each layer and head keeps, how it treats "
    "the first ones, and how similar the choices of runs, chunks, heads and texts are. Needs "
    "edgeh2o[plot]."
)
EXAMPLES = """\
  edgeh2o heatmap model.gguf -f text.txt --folder pictures"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser)
    add_context_option(parser)
    parser.add_argument(
        "--layers",
        type=list_of(int),
        metavar="N,...",
        help="layers to draw chunk by chunk (default: a few)",
    )
    output = add_evaluation_options(parser)
    output.add_argument(
        "--folder",
        type=Path,
        default=Path("attention_heatmaps"),
        help="where the pictures go (default: attention_heatmaps)",
    )


def execute(args: argparse.Namespace) -> int:
    """Reads the text, writes the pictures, prints the summary; returns the exit code."""
    options, text = read_inputs(args)

    from ..evaluation import figures
    from ..evaluation.attention_patterns import SUMMARY_NAME, visualize_attention_patterns

    figures.check_matplotlib()
    check_writable(args.folder / SUMMARY_NAME, "--folder", makes_folders=True)
    evaluate_windows(
        options,
        visualize_attention_patterns,
        text,
        warns_of_chunks=False,  # they are refused
        folder=args.folder,
        layers=args.layers,
        on_report=partial(print_results, args.output),
    )
    return 0
