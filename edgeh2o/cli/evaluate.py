"""``edgeh2o evaluate``: what the sparse prefill costs on every kind of text."""

from __future__ import annotations

import argparse

from .evaluation_options import (
    add_context_option,
    add_evaluation_options,
    list_of,
    print_results,
)
from .model_options import add_model_argument, open_model, read_model_options

HELP = "compare sparse and dense prefill on prose, code, dialogue, copies and look-ups"
DESCRIPTION = (
    "Read texts of several kinds, made by seeds, densely and sparsely and compare the predictions "
    "of their last quarters: what asks for the rest of a long prompt."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_context_option(parser)
    parser.add_argument(
        "--kinds",
        type=list_of(str),
        default=(),
        metavar="LIST",
        help="kinds of text: prose, code, dialogue, facts, copied-prose, copied-code, pairs "
        "(default: all)",
    )
    parser.add_argument(
        "--text-seeds",
        type=list_of(int),
        default=(0, 1),
        metavar="LIST",
        help="seeds of the texts, a window of each kind for every one (default: 0,1)",
    )
    add_evaluation_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Reads the windows, prints the report; returns the exit code."""
    options = read_model_options(args)

    from ..evaluation.suite import evaluate_suite
    from ..evaluation.windows import choose_window_size

    with open_model(options) as (llm, bars):
        report = evaluate_suite(
            llm,
            context_size=choose_window_size(llm, options.runtime.context_size),
            kinds=args.kinds,
            seeds=args.text_seeds,
            on_progress=bars,
        )
    print_results(args.output, report)
    return 0
