"""``edgeh2o evaluate``: what the sparse prefill costs on texts and tasks of every kind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .evaluation_options import (
    add_context_option,
    add_decode_option,
    add_evaluation_options,
    list_of,
    print_results,
)
from .model_options import add_model_argument, open_model, read_model_options

HELP = "compare sparse and dense prefill on texts, or on tasks that need a long context"
DESCRIPTION = (
    "Read texts of several kinds, made by seeds, densely and sparsely. --suite texts compares the "
    "predictions of their last quarters: what asks for the rest of a long prompt. --suite long "
    "asks questions about them and counts right answers."
)
EXAMPLES = """\
  edgeh2o evaluate model.gguf
  edgeh2o evaluate model.gguf --suite long --budget 512"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_context_option(parser)
    parser.add_argument(
        "--suite",
        choices=("texts", "long"),
        default="texts",
        help="texts: loss and KL divergence on every kind of text; long: right answers to "
        "questions about long texts (default: texts)",
    )
    parser.add_argument(
        "--kinds",
        type=list_of(str),
        metavar="LIST",
        help="kinds of text: prose, code, dialogue, facts, copied-prose, copied-code, pairs, "
        "table (default: all)",
    )
    add_decode_option(parser)
    parser.add_argument(
        "--tasks",
        type=list_of(str),
        metavar="LIST",
        help="tasks of --suite long: needles-4, needles-8, json, variables, copy, count, classify, "
        "dialogue (default: all)",
    )
    parser.add_argument(
        "--text-seeds",
        type=list_of(int),
        default=(0, 1),
        metavar="LIST",
        help="seeds of the texts, one of each kind or task for every seed (default: 0,1)",
    )
    parser.add_argument(
        "--questions",
        type=int,
        metavar="N",
        help="questions of --suite long about each text, at most (default: 10; needles: all)",
    )
    output = add_evaluation_options(parser)
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the tasks of --suite long (needs edgeh2o[plot])",
    )


def execute(args: argparse.Namespace) -> int:
    """Reads the texts, prints the report; returns the exit code."""
    options = read_model_options(args)
    is_long = args.suite == "long"
    for flag, is_given, suite in (
        ("--kinds", args.kinds is not None, "texts"),
        ("--decode", args.decode is not None, "texts"),
        ("--tasks", args.tasks is not None, "long"),
        ("--questions", args.questions is not None, "long"),
        ("--plot", args.plot is not None, "long"),
    ):
        if is_given and suite != args.suite:
            raise UsageError(f"{flag} belongs to --suite {suite}, and the suite is {args.suite}")

    from ..evaluation import figures
    from ..evaluation.long_suite import evaluate_tasks
    from ..evaluation.suite import evaluate_suite
    from ..evaluation.tasks import DEFAULT_QUESTIONS
    from ..evaluation.windows import choose_window_size

    if args.plot is not None:
        figures.check_picture(args.plot)
    with open_model(options) as (llm, bars):
        shared: dict[str, Any] = {
            "context_size": choose_window_size(llm, options.runtime.context_size),
            "seeds": args.text_seeds,
            "on_progress": bars,
        }
        if not is_long:
            texts = evaluate_suite(llm, kinds=args.kinds or (), n_decoded=args.decode, **shared)
            print_results(args.output, texts)
            return 0
        n_questions = DEFAULT_QUESTIONS if args.questions is None else args.questions
        report = evaluate_tasks(llm, tasks=args.tasks or (), n_questions=n_questions, **shared)
    print_results(args.output, report)
    if args.plot is not None:
        figures.draw_tasks(report, args.plot)
    return 0
