"""``edgeh2o ablate``: loss against cost over a grid of attention settings."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import PrefillConfig
from ..errors import UsageError
from ..formats.atomic_file import check_writable, make_folder, write_file
from .evaluation_options import (
    add_evaluation_options,
    add_inputs,
    add_window_options,
    evaluate_windows,
    print_results,
    read_inputs,
)
from .options import flag_of, given_options, parse_value

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig

TABLE_NAME = "perplexity_ablation.csv"
PICTURE_NAME = "perplexity_ablation.png"

HELP = "measure loss and cost over a grid of attention settings"
DESCRIPTION = (
    "Measure the loss of every combination of attention settings on the same "
    f"windows of a text. Writes {TABLE_NAME} and {PICTURE_NAME}."
)
EXAMPLES = """\
  edgeh2o ablate model.gguf -f text.txt --grid budget=512,1024
  edgeh2o ablate model.gguf -f text.txt --attention h2o --grid local=128,256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser)
    parser.add_argument(
        "--grid",
        action="append",
        metavar="FIELD=V1,V2,...",
        required=True,
        help="values of a setting of the attention, or of chunk_size; may be given several times",
    )
    add_window_options(parser, windows=1)
    output = add_evaluation_options(parser)
    output.add_argument(
        "--folder", type=Path, default=Path(), help="where the files go (default: here)"
    )
    output.add_argument(
        "--no-plot",
        dest="plot",
        action="store_false",
        help=f"do not draw {PICTURE_NAME}, which needs edgeh2o[plot]",
    )


def execute(args: argparse.Namespace) -> int:
    """Measures the grid, writes the files, prints the report; returns the exit code."""
    options, text = read_inputs(args)
    grid = parse_grid(args.grid, options.attention)

    from ..evaluation import figures
    from ..evaluation.ablation import evaluate_ablation, expand_grid
    from ..evaluation.reporting import format_csv

    preferred = options.attention.preferred_chunk_size
    expand_grid(options.attention, options.prefill.with_chunk_size(preferred)[1], grid)
    if args.plot:
        figures.check_matplotlib()
    for name in (TABLE_NAME, PICTURE_NAME):
        check_writable(args.folder / name, "--folder", makes_folders=True)
    warn_of_overridden(args, options.attention, grid)
    report = evaluate_windows(
        options,
        evaluate_ablation,
        text,
        warns_of_chunks="chunk_size" not in grid,
        grid=grid,
        windows=args.windows,
        skip=args.skip,
    )
    print_results(args.output, report)
    make_folder(args.folder)
    write_file(args.folder / TABLE_NAME, format_csv(report.to_records()) + "\n")
    if args.plot:
        figures.draw_ablation(report, args.folder / PICTURE_NAME)
    return 0


def warn_of_overridden(
    args: argparse.Namespace, attention: SparseAttentionConfig, grid: Mapping[str, object]
) -> None:
    """Warns of every flag whose setting the grid varies."""
    for config, prefix in ((type(attention), attention.algorithm), (PrefillConfig, "")):
        for name, value in given_options(args, config, prefix=prefix).items():
            if name in grid:
                flag = flag_of(config, name, prefix=prefix)
                warnings.warn(f"--grid {name} takes the place of {flag} {value}", stacklevel=1)


def parse_grid(
    arguments: Sequence[str], attention: SparseAttentionConfig
) -> dict[str, tuple[Any, ...]]:
    """``local=128,256`` as values of the field's type, in the order given.

    Raises UsageError for an argument of another form or a value of another type. Fields that the
    attention does not have are left to ``expand_grid``.
    """
    types = {
        item.name: str(item.type)
        for config in (PrefillConfig, attention)
        for item in fields(config)
    }
    grid: dict[str, tuple[Any, ...]] = {}
    for argument in arguments:
        name, found, values = argument.partition("=")
        name = name.strip().replace("-", "_")
        if not found or not name:
            raise UsageError(f"--grid takes FIELD=V1,V2,..., got {argument!r}")
        if name in grid:
            raise UsageError(f"--grid gives {name} twice; put its values into one list")
        try:
            grid[name] = tuple(
                parse_value(types.get(name, "str"), value.strip())
                for value in values.split(",")
                if value.strip()
            )
        except ValueError:
            raise UsageError(
                f"--grid {argument}: {name} takes values of type {types[name]}"
            ) from None
    return grid
