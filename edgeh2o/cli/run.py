"""``edgeh2o run``: answers one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..config import PrefillConfig, RuntimeConfig, SamplingParams
from .options import add_config_options, read_config
from .progress import ProgressBars, bars_for_terminal
from .prompt import add_prompt_options, read_prompt

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..llm import LLM, GenerationResult, GenerationStream

EXIT_INTERRUPTED = 130


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the main parser."""
    from ..attention.h2o import H2OConfig

    parser = verbs.add_parser(
        "run",
        help="answer a prompt",
        description="Answer a prompt. The answer streams to stdout, statistics go to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="GGUF file, or a known model such as smollm2-135m"
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--no-special",
        dest="parse_special",
        action="store_false",
        help="take the text of control tokens such as <|im_start|> literally",
    )
    add_config_options(parser, SamplingParams, title="sampling")
    add_config_options(parser, RuntimeConfig, title="machine")
    add_config_options(parser, PrefillConfig, title="prefill")
    add_config_options(
        parser,
        H2OConfig,
        title="sparse attention (both 0: dense attention)",
        prefix="h2o",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    level = output.add_mutually_exclusive_group()
    level.add_argument("--quiet", action="store_true", help="print the answer only")
    level.add_argument("--verbose", action="store_true", help="say what is loaded and how")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Loads the model, streams the answer; returns the exit code."""
    sampling = read_config(args, SamplingParams)
    runtime = read_config(args, RuntimeConfig)
    prefill = read_config(args, PrefillConfig)
    attention = _read_attention(args)
    prompt = read_prompt(args)

    import logging

    from ..formats.pull import resolve_model
    from ..llm import LLM

    logging.basicConfig(format="edgeh2o: warning: %(message)s")
    path = resolve_model(args.model, on_message=None if args.quiet else _print_note)
    bars = bars_for_terminal(quiet=args.quiet)
    try:
        with LLM(
            path,
            context_size=runtime.context_size,
            threads=runtime.threads,
            isa=runtime.isa,
            cache_type=runtime.cache_type,
            prefill=prefill,
            attention=attention,
            on_progress=bars,
        ) as llm:
            if args.verbose:
                bars.close()
                _print_note(_describe(llm))
            stream = llm.stream(prompt, sampling, parse_special=args.parse_special)
            return _answer(stream, bars, args)
    finally:
        bars.close()


def _read_attention(args: argparse.Namespace) -> SparseAttentionConfig:
    from ..attention.dense import DenseConfig
    from ..attention.h2o import H2OConfig

    if args.h2o_local == 0 and args.h2o_heavy == 0:
        return DenseConfig()
    return read_config(args, H2OConfig, prefix="h2o")


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
    _print_note(f"{title}\n{result.stats.format_table()}")


def _describe(llm: LLM) -> str:
    config = llm.config
    return (
        f"{llm.model_path}: {config.architecture}, {config.n_layers} layers, "
        f"{config.n_heads} query heads, {config.n_kv_heads} KV heads of {config.head_dim}, "
        f"vocabulary {config.vocab_size}, trained on {config.context_length} positions\n"
        f"kernels: {llm.isa}, threads: {llm.threads}"
    )


def _print_note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
