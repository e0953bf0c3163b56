"""``edgeh2o batch``: answers a file of requests, and goes on where it was stopped."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..sampling_config import SamplingParams
from .chat_options import add_template_options, read_template
from .leaving import leaving_on_signals
from .model_options import (
    ModelOptions,
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    check_together,
    open_model,
    print_note,
    read_model_options,
)
from .options import read_config
from .serving_options import add_sampling_defaults, model_name, note_profile, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.session import Session
    from ..serving.batch import BatchItem, ResultFile

HELP = "answer a file of requests (OpenAI's batch format)"
DESCRIPTION = (
    "Answer every request of a JSONL file in OpenAI's batch format. A result is a line, written as "
    "it comes; the same command again goes on where it was stopped. Requests that begin alike are "
    "read once as far as they do: put the shared instructions first."
)
EXAMPLES = """\
  edgeh2o batch model.gguf requests.jsonl -o results.jsonl --parallel 4
  head -1 requests.jsonl
  {"custom_id": "1", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}]}}"""
_SECONDS_BETWEEN_NOTES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    parser.add_argument("input", metavar="IN.jsonl", help="the requests")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", required=True, help="the results")
    parser.add_argument(
        "--parallel", type=int, default=2, metavar="N", help="answered at once (default: 2)"
    )
    parser.add_argument(
        "--prefix-cache-ram",
        type=parse_size,
        metavar="SIZE",
        help="memory of prompts kept to go on from (default: a quarter of what is free)",
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="answer on the workers of this Dask scheduler, such as tcp://10.0.0.1:8786; MODEL is "
        "a path or a name there (needs edgeh2o[dask])",
    )
    add_template_options(parser.add_argument_group("chat"))
    add_sampling_defaults(parser, has_draft=False)  # answers are written side by side
    add_model_options(parser)
    add_verbosity_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Answers what has no result yet; returns 1 if a request was refused, now or before, else 0."""
    if not 1 <= args.parallel <= 256:
        raise UsageError(f"--parallel must be from 1 to 256, got {args.parallel}")
    if args.output == "-":
        raise UsageError(
            "results need a regular file, from which a later run goes on, and not the standard "
            "output; name a file with -o (./- for one of that name)"
        )
    sampling = read_config(args, SamplingParams)
    options = read_model_options(args)
    check_together(sampling, options)

    from ..serving.batch import ResultFile, read_items

    source, target = Path(args.input), Path(args.output)
    items = read_items(source)
    if target.exists() and target.samefile(source):
        raise UsageError("-o names the file of the requests; name another one")
    results, report = ResultFile(target), _Report(is_quiet=args.quiet)
    try:
        if all(item.digest in results.done for item in items):
            report(len(items), len(items))
        elif args.dask is not None:
            _run_on_cluster(args, options, sampling, items, results, report)
        else:
            _run_here(args, options, sampling, items, results, report)
    finally:
        results.close()
    n_refused = results.count_refused(items)
    if n_refused and not args.quiet:
        print_note(f"refused requests: {n_refused:,}; {target} has their errors")
    return 1 if n_refused else 0


class _Report:
    """Says now and then how many of the requests are done: ``report(done, total)``."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._started_at = self._noted_at = time.monotonic()
        self._n_before: int | None = None  # done by earlier runs

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._n_before is None:
            self._n_before = done
        is_due = now - self._noted_at >= _SECONDS_BETWEEN_NOTES or done == total
        if self._is_quiet or not is_due:
            return
        self._noted_at, n_new, left = now, done - self._n_before, ""
        if n_new:
            left = f", {(now - self._started_at) / n_new * (total - done):,.0f} s left"
        print_note(f"{done:,} of {total:,} requests{left}")


def _run_here(
    args: argparse.Namespace,
    options: ModelOptions,
    sampling: SamplingParams,
    items: Sequence[BatchItem],
    results: ResultFile,
    report: _Report,
) -> None:
    """On a model that this process loads."""
    from ..serving.answers import AnswerEngine
    from ..serving.batch import run_batch

    opened: list[Session] = []
    with open_model(options, check=opened.append, **read_template(args)) as (_, bars):
        bars.close()
        opened[0].check_options(sampling)  # else every request would be refused
        note_profile(opened[0], is_quiet=args.quiet)
        engine = AnswerEngine(opened[0], prefix_ram_bytes=args.prefix_cache_ram)
        try:
            with leaving_on_signals():
                run_batch(
                    engine,
                    items,
                    results,
                    model_name=model_name(options.model),
                    sampling=sampling,
                    parallel=args.parallel,
                    on_done=report,
                )
        finally:
            engine.close()


def _run_on_cluster(
    args: argparse.Namespace,
    options: ModelOptions,
    sampling: SamplingParams,
    items: Sequence[BatchItem],
    results: ResultFile,
    report: _Report,
) -> None:
    """On the workers of a Dask scheduler."""
    from ..serving.cluster_batch import WorkerSettings, run_on_cluster

    settings = WorkerSettings(
        model=options.model,
        model_name=model_name(options.model),
        runtime=options.runtime,
        prefill=options.prefill,
        attention=options.attention,
        sampling=sampling,
        template=read_template(args),
        prefix_ram_bytes=args.prefix_cache_ram,
    )
    with leaving_on_signals():
        run_on_cluster(args.dask, settings, items, results, on_done=report)
