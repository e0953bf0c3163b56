"""``edgeh2o perplexity``: what the sparse prefill costs on a text."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from .evaluation_options import (
    add_decode_option,
    add_evaluation_options,
    add_inputs,
    add_window_options,
    evaluate_windows,
    print_results,
    read_inputs,
)

if TYPE_CHECKING:
    from ..evaluation.perplexity import PerplexityReport
    from ..llm import LLM

HELP = "compare the predictions of sparse and dense prefill on a text"
DESCRIPTION = (
    "Read windows of a text densely and sparsely in one run and compare the "
    "predictions of every token: perplexity, loss, KL divergence, top-1 agreement, each with "
    "its standard error."
)
EXAMPLES = """\
  edgeh2o perplexity model.gguf -f text.txt
  edgeh2o perplexity model.gguf -f text.txt --ctx 8192 --windows 4 --budget 512"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser)
    add_window_options(parser, windows=None)
    add_decode_option(parser)
    add_evaluation_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Reads the windows, prints the report; returns the exit code."""
    options, text = read_inputs(args)

    from ..evaluation.perplexity import evaluate_perplexity

    if args.decode is None:
        report = evaluate_windows(
            options, evaluate_perplexity, text, windows=args.windows, skip=args.skip
        )
    else:
        report = evaluate_windows(
            options,
            partial(_decode, args.decode),
            text,
            warns_of_chunks=False,  # tokens are decoded one by one
            windows=args.windows,
        )
    print_results(args.output, report)
    return 0


def _decode(n_decoded: int, llm: LLM, text: str, **settings: Any) -> PerplexityReport:
    from ..evaluation.decoding import evaluate_decoding

    return evaluate_decoding(llm, text, n_decoded, **settings)
