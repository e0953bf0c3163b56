"""``edgeh2o agreement``: is greedy decoding after a sparse prefill that after a dense one?"""

from __future__ import annotations

import argparse

from .evaluation_options import (
    add_context_option,
    add_evaluation_options,
    add_inputs,
    evaluate_windows,
    print_results,
    read_inputs,
)

HELP = "compare greedy texts after sparse and dense prefill"
DESCRIPTION = (
    "Read windows of a text sparsely and densely, decode greedily after each and "
    "compare the texts, and the distributions of the first token. A second dense prefill in "
    "other chunks shows how much of the difference is rounding."
)
EXAMPLES = """\
  edgeh2o agreement model.gguf -f text.txt --prompts 5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser)
    add_context_option(parser)
    parser.add_argument(
        "--prompts", type=int, metavar="K", default=20, help="windows to read (default: 20)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        default=100,
        help="tokens to decode after every prompt (default: 100)",
    )
    add_evaluation_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Decodes after every prompt, prints the report; returns the exit code."""
    options, text = read_inputs(args)

    from ..evaluation.agreement import evaluate_agreement

    report = evaluate_windows(
        options, evaluate_agreement, text, prompts=args.prompts, n_tokens=args.tokens
    )
    print_results(args.output, report)
    return 0
