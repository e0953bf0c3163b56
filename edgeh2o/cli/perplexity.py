"""``edgeh2o perplexity``: what the sparse prefill costs on a text."""

from __future__ import annotations

import argparse

from .evaluation_options import (
    add_evaluation_options,
    add_inputs,
    add_window_options,
    evaluate_windows,
    print_results,
    read_inputs,
)

HELP = "compare the predictions of sparse and dense prefill on a text"
DESCRIPTION = (
    "Read windows of a text densely and sparsely in one run and compare the "
    "predictions of every token: perplexity, loss, KL divergence, top-1 agreement, each with "
    "its standard error."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser)
    add_window_options(parser, windows=None)
    add_evaluation_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Reads the windows, prints the report; returns the exit code."""
    options, text = read_inputs(args)

    from ..evaluation.perplexity import evaluate_perplexity

    report = evaluate_windows(
        options, evaluate_perplexity, text, windows=args.windows, skip=args.skip
    )
    print_results(args.output, report)
    return 0
