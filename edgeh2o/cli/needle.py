"""``edgeh2o needle``: does the sparse prefill still find a passkey in a long text?"""

from __future__ import annotations

import argparse
from pathlib import Path

from .evaluation_options import (
    add_evaluation_options,
    add_inputs,
    list_of,
    print_results,
    read_inputs,
)
from .model_options import open_model

HELP = "hide a passkey in long prompts and ask for it"
DESCRIPTION = (
    "Hide a passkey in prompts of several lengths, at several depths and places "
    "inside a chunk. The prompts are read and answered densely, and with the attention under test."
)
EXAMPLES = """\
  edgeh2o needle model.gguf
  edgeh2o needle model.gguf --chat --lengths 4096,8192 --depths 0,0.5,1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser, required=False)
    parser.add_argument(
        "--chat", action="store_true", help="put the prompts into the model's chat template"
    )
    grid = parser.add_argument_group("grid")
    grid.add_argument(
        "--lengths",
        type=list_of(int),
        metavar="N,...",
        default=(2048, 4096),
        help="tokens of whole prompts (default: 2048,4096)",
    )
    grid.add_argument(
        "--depths",
        type=list_of(float),
        metavar="X,...",
        default=(0.1, 0.5, 0.9),
        help="depths of the passkey, 0 = beginning, 1 = end (default: 0.1,0.5,0.9)",
    )
    grid.add_argument(
        "--places",
        type=list_of(str),
        metavar="PLACE,...",
        default=("start", "middle", "end"),
        help="places inside the chunk that holds the passkey (default: start,middle,end)",
    )
    grid.add_argument(
        "--passkey-seed", type=int, metavar="N", default=0, help="seed of the passkeys (default: 0)"
    )
    grid.add_argument(
        "--generate",
        type=int,
        metavar="N",
        default=0,
        help="decode the last N tokens of the text and the question one by one, as if the model "
        "had written them: what it finds of its prompt then (default: 0)",
    )
    output = add_evaluation_options(parser, skip=("context_size",))
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw a heat map (needs edgeh2o[plot])"
    )


def execute(args: argparse.Namespace) -> int:
    """Asks for every passkey, prints the report; returns the exit code."""
    options, filler = read_inputs(args)

    from ..evaluation import figures
    from ..evaluation.needle import NeedleGrid, evaluate_needle

    grid = NeedleGrid(
        lengths=args.lengths,
        depths=args.depths,
        places=args.places,
        seed=args.passkey_seed,
        generated=args.generate,
    )
    if args.plot is not None:
        figures.check_picture(args.plot)
    with open_model(options) as (llm, bars):
        report = evaluate_needle(llm, grid, filler=filler, chat=args.chat, on_progress=bars)
    print_results(args.output, report)
    if args.plot is not None:
        figures.draw_needle(report, args.plot)
    return 0
