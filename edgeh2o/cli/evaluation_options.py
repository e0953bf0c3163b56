"""What the evaluating verbs share: the text, windows, running, output formats."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from .model_options import (
    ModelOptions,
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    open_model,
    read_model_options,
)
from .prompt import read_text

OUTPUTS = ("text", "csv", "json")
# What a chunk reads of the past is chosen by these, and by others for single tokens.
_BY_CHUNKS = ("h2o", "headwise")
Value = TypeVar("Value")
Result = TypeVar("Result")


class Report(Protocol):
    """Results that can be printed in every format."""

    def to_dict(self) -> dict[str, Any]: ...

    def to_records(self) -> list[dict[str, Any]]: ...

    def format_text(self) -> str: ...


def add_inputs(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds MODEL and ``-f FILE``, a text that is ``required`` or made by edgeh2o."""
    add_model_argument(parser)
    note = "" if required else " (default: a text made by edgeh2o)"
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        required=required,
        help=f"UTF-8 text to read, - for standard input{note}",
    )


def read_inputs(args: argparse.Namespace) -> tuple[ModelOptions, str | None]:
    """The model and how it is run, and the text, None if none was given."""
    options = read_model_options(args)
    return options, None if args.file is None else read_text(args.file)


def add_context_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ctx N``, which is another name of ``-c``."""
    parser.add_argument(
        "--ctx",
        dest="context_size",
        type=int,
        metavar="N",
        help="tokens of a window, the same as -c (default: 4096)",
    )


def add_decode_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--decode N``."""
    parser.add_argument(
        "--decode",
        type=int,
        metavar="N",
        help="decode the last N tokens of every window, by --decode-attention and densely, and "
        "compare these",
    )


def add_window_options(parser: argparse.ArgumentParser, *, windows: int | None) -> None:
    """Adds ``--ctx N``, ``--windows K`` and ``--skip N``."""
    add_context_option(parser)
    parser.add_argument(
        "--windows",
        type=int,
        metavar="K",
        default=windows,
        help=f"windows to read (default: {'all' if windows is None else windows})",
    )
    parser.add_argument(
        "--skip",
        type=int,
        metavar="N",
        default=1024,
        help="report also the tokens after the first N of a window (default: 1024)",
    )


def add_evaluation_options(
    parser: argparse.ArgumentParser,
    *,
    skip: Collection[str] = (),
    formats: Sequence[str] = OUTPUTS,
) -> argparse._ArgumentGroup:
    """Adds how the model is run, and the group "output", which is returned.

    ``skip`` is that of ``add_model_options``; the first of ``formats`` is the default.
    """
    add_model_options(parser, skip=skip)
    output = parser.add_argument_group("output")
    output.add_argument(
        "-o",
        "--output",
        choices=formats,
        default=formats[0],
        help=f"format of the results on stdout (default: {formats[0]})",
    )
    add_verbosity_options(output)
    return output


def list_of(parse: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """An argparse type: values between commas."""

    def parse_list(text: str) -> tuple[Value, ...]:
        try:
            return tuple(parse(field.strip()) for field in text.split(",") if field.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected values between commas such as 1,2, got {text!r}"
            ) from None

    return parse_list


def evaluate_windows(
    options: ModelOptions,
    evaluate: Callable[..., Result],
    text: str | None,
    *,
    warns_of_chunks: bool = True,
    **settings: Any,
) -> Result:
    """What ``evaluate(llm, text, context_size=..., on_progress=..., **settings)`` gives.

    Warns of windows that are a chunk each, of which nothing is left out, if ``warns_of_chunks``.
    """
    from ..evaluation.windows import choose_window_size

    with open_model(options) as (llm, bars):
        context_size = choose_window_size(llm, options.runtime.context_size)
        result = evaluate(llm, text, context_size=context_size, on_progress=bars, **settings)
        is_by_chunks = llm.attention.algorithm in _BY_CHUNKS
        if context_size <= llm.chunk_size and warns_of_chunks and is_by_chunks:
            warnings.warn(
                f"a window of {context_size} tokens is one chunk (-ub {llm.chunk_size}), which "
                "reads all of itself: nothing is left out; use larger windows (--ctx) or smaller "
                "chunks",
                stacklevel=1,
            )
        return result


def print_results(output: str, report: Report) -> None:
    """Prints a report in one of ``OUTPUTS`` to stdout."""
    from ..evaluation.reporting import format_csv, format_json

    if output == "json":
        print(format_json(report.to_dict()))
    elif output == "csv":
        print(format_csv(report.to_records()))
    else:
        print(report.format_text())
