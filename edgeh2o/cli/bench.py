"""``edgeh2o bench``: tokens per second of prefill and decode, dense and sparse."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats.atomic_file import check_writable, make_folder
from .evaluation_options import add_evaluation_options, add_inputs, list_of, read_inputs
from .model_options import open_model

if TYPE_CHECKING:
    from ..evaluation.throughput import Throughput

OUTPUTS = ("md", "csv", "json", "jsonl")
SPEED_PICTURE = "throughput_comparison.png"
MEMORY_PICTURE = "memory_profile.png"

HELP = "measure prefill and decode speed, dense and sparse"
DESCRIPTION = (
    "Measure the speed of prefill and decode, without tokenisation and sampling. "
    "Dense and sparse attention take turns. Lists stand between commas."
)
EXAMPLES = """\
  edgeh2o bench model.gguf
  edgeh2o bench model.gguf -p 512,4096 -n 64 -r 5 -o csv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_inputs(parser, required=False)
    tests = parser.add_argument_group("tests")
    numbers = list_of(int)
    for flags, default, note in (
        (("-p", "--n-prompt"), (512, 4096), "prompt lengths to read, 0 = none"),
        (("-n", "--n-gen"), (64,), "numbers of tokens to decode, 0 = none"),
        (("-d", "--n-depth"), (0,), "tokens in the cache before the decoding"),
    ):
        tests.add_argument(
            *flags,
            type=numbers,
            metavar="N,...",
            default=default,
            help=f"{note} (default: {','.join(map(str, default))})",
        )
    tests.add_argument(
        "-r", "--repetitions", type=int, metavar="N", default=3, help="timed runs (default: 3)"
    )
    tests.add_argument(
        "-t",
        "--threads",
        dest="thread_counts",
        type=numbers,
        metavar="N,...",
        default=(),
        help="numbers of threads (default: usable cores of the fastest kind)",
    )
    tests.add_argument(
        "--modes",
        type=list_of(str),
        metavar="MODE,...",
        default=("dense", "sparse"),
        help="attention to measure: dense, sparse or both (default: dense,sparse)",
    )
    tests.add_argument("--no-warmup", action="store_true", help="no run before the timed ones")
    output = add_evaluation_options(parser, skip=("context_size", "threads"), formats=OUTPUTS)
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help=f"draw {SPEED_PICTURE} and {MEMORY_PICTURE} (needs edgeh2o[plot])",
    )
    output.add_argument(
        "--llama-bench",
        type=Path,
        metavar="FILE.csv",
        help="draw also the prefill tests that 'llama-bench -o csv' wrote",
    )


def execute(args: argparse.Namespace) -> int:
    """Runs every test, prints the results; returns the exit code."""
    options, text = read_inputs(args)

    from ..errors import UsageError
    from ..evaluation import figures
    from ..evaluation.llama_bench import read_llama_bench
    from ..evaluation.throughput import benchmark_throughput, plan_workloads

    workloads = plan_workloads(args.n_prompt, args.n_gen, args.n_depth)
    peer = {} if args.llama_bench is None else read_llama_bench(args.llama_bench)
    if args.plot is not None:
        figures.check_matplotlib()
        if not any(workload.n_prompt for workload in workloads):
            raise UsageError("--plot draws the prefill over its length: give prompt lengths (-p)")
        for name in (SPEED_PICTURE, MEMORY_PICTURE):
            check_writable(args.plot / name, "--plot", makes_folders=True)
    elif peer:
        raise UsageError("--llama-bench is drawn beside our results: give --plot FOLDER")

    results: list[Throughput] = []
    for n_threads in args.thread_counts or (None,):
        runtime = replace(options.runtime, threads=n_threads)
        each = replace(options, runtime=runtime)
        with open_model(each) as (llm, bars):
            results += benchmark_throughput(
                llm,
                workloads,
                repetitions=args.repetitions,
                modes=args.modes,
                text=text,
                warm_up=not args.no_warmup,
                on_progress=bars,
            )
    _print_results(args.output, results)
    if args.plot is not None:
        make_folder(args.plot)
        figures.draw_throughput(results, args.plot / SPEED_PICTURE, peer=peer)
        figures.draw_memory(results, args.plot / MEMORY_PICTURE)
    return 0


def _print_results(output: str, results: Sequence[Throughput]) -> None:
    from ..evaluation.reporting import describe_machine, format_csv, format_json
    from ..evaluation.throughput import format_throughput

    if output == "json":
        print(format_json({"results": [result.to_dict() for result in results]}))
    elif output == "jsonl":
        for result in results:
            print(json.dumps(result.to_dict(), ensure_ascii=False))
    elif output == "csv":
        print(format_csv([result.to_record() for result in results]))
    else:
        machine = describe_machine()
        print(f"{machine['cpu']}, {machine['cores']} cores, edgeh2o {machine['edgeh2o']}\n")
        print(format_throughput(results))
