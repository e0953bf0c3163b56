"""Prefill speed over the prompt length: edgeh2o sparse and dense beside llama.cpp, and a plot.

Two tables. The first has tokens/s of whole prompts, each read by a process of its own as in
bench.prefill; the slow contestants read long prompts once and without a warm-up. The second says
what 4,096 tokens cost at every depth of the longest prompt, sparse with default settings, and how
flat that is from 8,192 tokens on. Memory is warm there: the first pass is not counted.

A model whose context is shorter than the longest prompt is copied with a longer context in its
metadata and a larger base of the rotary embedding (NTK scaling), for both sides. Weights and shapes
stay, and so does the table of head budgets; what such a model answers is not measured here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgeh2o import LLM, isa
from edgeh2o.errors import EdgeH2OError
from edgeh2o.evaluation.figures import (
    check_picture,
    label_speed_over_length,
    mark_thousands,
    picture,
)
from edgeh2o.evaluation.filler import filler_tokens
from edgeh2o.evaluation.reporting import format_samples, markdown_table
from edgeh2o.evaluation.throughput import Workload
from edgeh2o.formats.gguf import open_gguf

from .llama_cpp import LlamaCpp
from .prefill import DEFAULT_TEXT, OWN, THEIRS, alternate, contest_parser, make_run, parse_sizes
from .reporting import existing_file, print_progress, run_script, write_report

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DEPTH_STEP = 4096
# From here on the cost of a token should no longer grow.
FLAT_FROM = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthResult:
    """Samples in tokens/s of whole prompts of one length, by contestant."""

    n_tokens: int
    samples: dict[str, list[float]]

    def best(self, names: Sequence[str]) -> list[float]:
        """Samples of the contestant with the highest median; empty if none took part."""
        taking_part = [self.samples[name] for name in names if self.samples.get(name)]
        return max(taking_part, key=statistics.median, default=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthResult:
    """What the DEPTH_STEP tokens before position ``end`` cost, sparse: a sample per round."""

    end: int
    keys_per_query: float
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Of one model, instruction set and number of threads."""

    model: str
    isa: str
    threads: int
    lengths: list[LengthResult]
    depths: list[DepthResult]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_parser("python -m bench.context_length", __doc__, needs_peer=False)
    parser.add_argument("model", type=existing_file, metavar="MODEL", help="GGUF file")
    parser.add_argument("-p", type=parse_sizes, default=LENGTHS, help="prompt lengths")
    parser.add_argument(
        "--slow-from",
        type=int,
        default=16384,
        metavar="N",
        help="dense and llama.cpp run once only from this length on (default: %(default)s)",
    )
    parser.add_argument(
        "--fa-off-up-to",
        type=int,
        default=8192,
        metavar="N",
        help="llama.cpp without flash attention up to this length (default: %(default)s)",
    )
    parser.add_argument(
        "--depth-tokens",
        type=int,
        metavar="N",
        help="length of the prompt of the second table (default: the longest, 0: no table)",
    )
    parser.add_argument(
        "--contestants",
        default=",".join((*OWN, *THEIRS)),
        help="which to run (default: %(default)s)",
    )
    parser.add_argument("--text", type=existing_file, default=DEFAULT_TEXT)
    parser.add_argument(
        "--add",
        type=existing_file,
        action="append",
        default=[],
        metavar="FILE.json",
        help="show results of an earlier run with -o json too; may be given several times",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs edgeh2o[plot]")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    return parser


def extend_context(model: Path, n_positions: int, folder: Path) -> Path:
    """The model with a context of ``n_positions`` at least: itself, or a copy in ``folder``.

    The base of the rotary embedding grows by s^(d / (d - 2)) for a context s times as long and d
    rotated elements of a head (NTK-aware scaling, bloc97 2023).
    """
    with open_gguf(model) as file:
        name = file.metadata.get_str("general.architecture")
        trained = file.metadata.get_int(f"{name}.context_length")
    if trained >= n_positions:
        return model
    try:
        from gguf import GGUFReader
    except ImportError:
        raise EdgeH2OError(
            f"{model.name} has a context of {trained:,}; a longer one needs the package gguf: "
            "pip install 'edgeh2o[test]'"
        ) from None
    copy = folder / f"{model.stem}-{n_positions}.gguf"
    shutil.copyfile(model, copy)
    reader = GGUFReader(copy, "r+")  # fields are views of the mapped file
    values = {key: field.parts[-1] for key, field in reader.fields.items()}
    n_rotated = int(values[f"{name}.rope.dimension_count"][0])
    values[f"{name}.context_length"][0] = n_positions
    values[f"{name}.rope.freq_base"][0] *= (n_positions / trained) ** (n_rotated / (n_rotated - 2))
    reader.data.flush()
    return copy


def main() -> int:
    """Runs everything, prints the tables; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read_depths(args)))
        return 0
    if args.r < 1 or any(n < 1 for n in args.p):
        parser.error("lengths and rounds are at least 1")
    if args.plot is not None:
        check_picture(args.plot)
    if len(args.llama_cpp) > 1 or not (args.llama_cpp or args.isa):
        parser.error("give one --llama-cpp, or --isa for a run without it")
    results = merge([*(load_results(path) for path in args.add), measure(args)])
    if args.plot is not None:
        draw(results, args.plot)
    write_report(args.output, format_tables(results), asdict(results))
    return 0


def measure(args: argparse.Namespace) -> Results:
    """Everything that the command line asks for."""
    peer = LlamaCpp(args.llama_cpp[0], args.threads) if args.llama_cpp else None
    args.isa = args.isa or (peer.isa() if peer else None)
    n_depth = max(args.p, default=0) if args.depth_tokens is None else args.depth_tokens
    with tempfile.TemporaryDirectory() as folder:
        longest = max((*args.p, n_depth))
        model = extend_context(args.model, longest, Path(folder))
        return Results(
            model=args.model.name,
            isa=args.isa,
            threads=args.threads,
            lengths=[measure_length(n, model, peer, args) for n in args.p],
            depths=measure_depths(n_depth, model, args) if n_depth else [],
        )


def measure_length(
    n_tokens: int, model: Path, peer: LlamaCpp | None, args: argparse.Namespace
) -> LengthResult:
    """Whole prompts of ``n_tokens``, the contestants in turns."""
    theirs = [name for name in THEIRS if name == "fa on" or n_tokens <= args.fa_off_up_to]
    possible = [*OWN, *(theirs if peer else [])]
    names = [name for name in possible if name in args.contestants.split(",")]
    is_slow = n_tokens >= args.slow_from
    runs = {}
    for name in names:
        no_warmup = is_slow and name != "sparse"
        options = argparse.Namespace(**{**vars(args), "no_warmup": no_warmup})
        runs[name] = make_run(name, model, peer, args.isa, options)
    workload = Workload(n_prompt=n_tokens)
    n_rounds = 1 if is_slow else args.r
    samples = alternate(runs, workload, n_rounds, f"{args.isa} {workload.name}")
    if n_rounds < args.r and "sparse" in names:
        more = alternate({"sparse": runs["sparse"]}, workload, args.r - n_rounds, workload.name)
        samples["sparse"] += more["sparse"]
    return LengthResult(n_tokens=n_tokens, samples=samples)


def measure_depths(n_tokens: int, model: Path, args: argparse.Namespace) -> list[DepthResult]:
    """Passes over one prompt of ``n_tokens`` in a process of its own."""
    command = [
        *(sys.executable, "-m", "bench.context_length", str(model), "--read"),
        *("--isa", args.isa, "-t", str(args.threads), "--text", str(args.text)),
        *("--depth-tokens", str(n_tokens), "-r", str(args.r)),
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise EdgeH2OError("reading the long prompt failed")
    return [DepthResult(**depth) for depth in json.loads(result.stdout)]


def read_depths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The fields of a ``DepthResult`` for every DEPTH_STEP tokens of the prompt.

    The prompt goes on after them, so that its last tokens read no more than others.
    """
    isa.use(args.isa)
    firsts = range(0, args.depth_tokens - DEPTH_STEP + 1, DEPTH_STEP)
    passes = []
    with LLM(args.model, threads=args.threads) as llm:
        tokens = filler_tokens(llm, args.depth_tokens, args.text.read_text(encoding="utf-8"))
        runner = llm.start_runner(args.depth_tokens)
        for number in range(args.r + 1):
            runner.reset()
            seconds, pairs = [], [0]
            for first in firsts:
                started_at = time.perf_counter()
                runner.prefill(tokens[first : first + DEPTH_STEP], is_last=False)
                seconds.append(time.perf_counter() - started_at)
                pairs.append(runner.pairs_computed)
            if number > 0:
                passes.append(seconds)
                costs = ", ".join(f"{cost:.2f}" for cost in seconds)
                print_progress(f"{args.isa} depths, round {number}/{args.r}: {costs} s")
    keys = ((after - before) / DEPTH_STEP for before, after in pairwise(pairs))
    return [
        {"end": first + DEPTH_STEP, "keys_per_query": n_keys, "seconds": seconds}
        for first, n_keys, *seconds in zip(firsts, keys, *passes, strict=True)
    ]


def load_results(path: Path) -> Results:
    """What a run with ``-o json`` printed. Raises EdgeH2OError for anything else."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
        lengths = [LengthResult(**each) for each in data.pop("lengths")]
        depths = [DepthResult(**each) for each in data.pop("depths")]
        return Results(**data, lengths=lengths, depths=depths)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EdgeH2OError(f"{path} is no result of this script: {error!r}") from None


def merge(parts: Sequence[Results]) -> Results:
    """Results of several runs; samples of the same length or depth come together.

    Raises EdgeH2OError if they are not of one model, instruction set and number of threads.
    """
    first = parts[0]
    lengths: dict[int, dict[str, list[float]]] = {}
    depths: dict[int, tuple[float, list[float]]] = {}
    for part in parts:
        if (part.model, part.isa, part.threads) != (first.model, first.isa, first.threads):
            raise EdgeH2OError("results of other models, instruction sets or threads do not fit")
        for length in part.lengths:
            samples = lengths.setdefault(length.n_tokens, {})
            for name, values in length.samples.items():
                samples.setdefault(name, []).extend(values)
        for depth in part.depths:
            depths.setdefault(depth.end, (depth.keys_per_query, []))[1].extend(depth.seconds)
    return Results(
        model=first.model,
        isa=first.isa,
        threads=first.threads,
        lengths=[LengthResult(n_tokens=n, samples=lengths[n]) for n in sorted(lengths)],
        depths=[
            DepthResult(end=end, keys_per_query=depths[end][0], seconds=depths[end][1])
            for end in sorted(depths)
        ],
    )


def spread(costs: Sequence[float]) -> float:
    """How much the highest is above the lowest, in percent."""
    return 100 * (max(costs) / min(costs) - 1)


def format_tables(results: Results) -> list[str]:
    """Tokens/s by length, cost by depth, and how flat both are."""
    parts = [f"{results.model}, {results.isa}, {results.threads} threads"]
    if results.lengths:
        header = ["prompt tokens", "edgeh2o sparse", "edgeh2o dense", "llama.cpp, better fa"]
        rows = []
        for length in results.lengths:
            sides = [length.best(names) for names in (("sparse",), ("dense",), THEIRS)]
            speeds = [format_samples(side) if side else "-" for side in sides]
            ratio = "-"
            if sides[0] and sides[2]:
                ratio = f"{statistics.median(sides[0]) / statistics.median(sides[2]):.1f}x"
            rows.append([f"{length.n_tokens:,}", *speeds, ratio])
        parts.append(markdown_table([*header, "sparse / llama.cpp"], rows))
    if results.depths:
        rows = [
            [
                f"{depth.end - DEPTH_STEP:,} to {depth.end:,}",
                f"{depth.keys_per_query:,.0f}",
                format_samples(depth.seconds, digits=2),
            ]
            for depth in results.depths
        ]
        parts.append(markdown_table(["tokens", "keys per query", "s of 4,096 tokens"], rows))
    return [*parts, *_format_flatness(results)]


def _format_flatness(results: Results) -> list[str]:
    lines = []
    if late := [each for each in results.depths if each.end - DEPTH_STEP >= FLAT_FROM]:
        medians = [statistics.median(depth.seconds) for depth in late]
        fastest = [min(depth.seconds) for depth in late]
        lines.append(
            f"The dearest {DEPTH_STEP:,} tokens between {FLAT_FROM:,} and {late[-1].end:,} cost "
            f"{spread(medians):.0f} % more than the cheapest; {spread(fastest):.0f} % by the "
            "fastest rounds, which other load disturbs least."
        )
    rates = [length.best(["sparse"]) for length in results.lengths if length.n_tokens >= FLAT_FROM]
    medians = [statistics.median(samples) for samples in rates if samples]
    if len(medians) > 1:
        lines.append(
            f"Sparse prompts from {FLAT_FROM:,} tokens on differ by {spread(medians):.0f} % in "
            "tokens/s."
        )
    return lines


def draw(results: Results, path: Path) -> None:
    """Tokens/s over the prompt length, and seconds per 4,096 tokens over the depth."""
    lines = {
        "edgeh2o sparse (default)": (("sparse",), "o-"),
        "edgeh2o dense": (("dense",), "s--"),
        "llama.cpp (better fa)": (THEIRS, "^:"),
    }
    with picture(path, 14, 6) as figure:
        over_length, over_depth = figure.subplots(1, 2, width_ratios=[3, 2])
        for label, (names, style) in lines.items():
            points = [
                (length.n_tokens, statistics.median(samples))
                for length in results.lengths
                if (samples := length.best(names))
            ]
            if points:
                over_length.plot(*zip(*points, strict=True), style, markersize=9, label=label)
        label_speed_over_length(over_length, [length.n_tokens for length in results.lengths])
        over_length.set_title("whole prompts")
        over_length.legend()
        centres = [depth.end - DEPTH_STEP / 2 for depth in results.depths]
        medians = [statistics.median(depth.seconds) for depth in results.depths]
        low = [median - min(d.seconds) for median, d in zip(medians, results.depths, strict=True)]
        high = [max(d.seconds) - median for median, d in zip(medians, results.depths, strict=True)]
        over_depth.bar(centres, medians, 0.85 * DEPTH_STEP, yerr=[low, high], capsize=4)
        over_depth.set_xticks([0, *(depth.end for depth in results.depths[1::2])])
        mark_thousands(over_depth.xaxis)
        over_depth.set_xlabel("position in the prompt (tokens)")
        over_depth.set_ylabel(f"seconds per {DEPTH_STEP:,} tokens")
        over_depth.set_title("sparse, at every depth: median and range")
        for axes in (over_length, over_depth):
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
        figure.suptitle(f"{results.model}, {results.isa}, {results.threads} threads")


if __name__ == "__main__":
    run_script(main)
