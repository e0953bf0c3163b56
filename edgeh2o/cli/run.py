"""``edgeh2o run``: answers one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..config import SamplingParams
from .model_options import (
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    open_model,
    print_note,
    read_model_options,
)
from .options import add_config_options, read_config
from .progress import ProgressBars
from .prompt import add_prompt_options, read_prompt

if TYPE_CHECKING:
    from ..engine.results import GenerationResult
    from ..llm import GenerationStream

EXIT_INTERRUPTED = 130


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the main parser."""
    parser = verbs.add_parser(
        "run",
        help="answer a prompt",
        description="Answer a prompt. The answer streams to stdout, statistics go to stderr.",
        allow_abbrev=False,
    )
    add_model_argument(parser)
    add_prompt_options(parser)
    parser.add_argument(
        "--no-special",
        dest="parse_special",
        action="store_false",
        help="take the text of control tokens such as <|im_start|> literally",
    )
    add_config_options(parser, SamplingParams, title="sampling")
    add_model_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    add_verbosity_options(output)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Loads the model, streams the answer; returns the exit code."""
    sampling = read_config(args, SamplingParams)
    options = read_model_options(args)
    prompt = read_prompt(args)
    with open_model(options, quiet=args.quiet, verbose=args.verbose) as (llm, bars):
        stream = llm.stream(prompt, sampling, parse_special=args.parse_special)
        return _answer(stream, bars, args)


def _answer(stream: GenerationStream, bars: ProgressBars, args: argparse.Namespace) -> int:
    """Prints the answer and the statistics, also when Ctrl-C ends it early."""
    code = 0
    last_text = ""
    try:
        for chunk in stream:
            bars.close()
            last_text = chunk.text or last_text
            if not args.json and chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    bars.close()
    result = stream.result()
    if args.json:
        print(json.dumps(result.to_dict(), ensure_ascii=False), flush=True)
        return code
    if last_text and not last_text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not args.quiet:
        _print_statistics(result, is_interrupted=code != 0)
    return code


def _print_statistics(result: GenerationResult, *, is_interrupted: bool) -> None:
    title = "interrupted; so far:" if is_interrupted else ""
    print_note(f"{title}\n{result.stats.format_table()}")
