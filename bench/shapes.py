"""The sizes that people run, against llama.cpp and ik_llama.cpp: prefill, decode and memory.

    python -m bench.shapes FOLDER --llama-cpp DIR --ik-llama-cpp DIR --types Q4_K_M,Q6_K

Files of random weights in the shapes of real models are made in FOLDER, unless they are there
(`tools.make_shape_model`). The contestants take turns; a turn is a process of its own that loads
the file, reads a prompt and decodes from an empty cache. Ours reads densely, as the default does
with prompts of these lengths; llama.cpp has flash attention, and ik_llama.cpp repacks besides
(``-rtr 1``). Memory is the peak of the resident set, mapped pages of the file included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgeh2o.evaluation.reporting import format_samples, markdown_table
from edgeh2o.evaluation.throughput import Workload

from .errors import LlamaCppError
from .llama_cpp import LlamaCpp
from .load import MIB, keeping_byte_code, run_measured
from .prefill import DEFAULT_TEXT, parse_sizes, take_turns
from .reporting import existing_file, print_progress, run_script, write_report

SHAPES = "llama-3.2-1b,qwen3-1.7b,llama-3.1-8b"
TYPES = "Q4_0,Q4_K_M,Q6_K,Q8_0"
OURS, LLAMA_CPP, IK_LLAMA_CPP = "edgeh2o", "llama.cpp", "ik_llama.cpp"


@dataclass(frozen=True, slots=True)
class Run:
    """One process: tokens/s of reading and of decoding, and its peak resident set in bytes."""

    prefill_tps: float
    decode_tps: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeMeasurement:
    """Runs by contestant on one file, with prompts of one length."""

    shape: str
    type: str
    isa: str
    threads: int
    n_prompt: int
    n_decode: int
    runs: dict[str, list[Run]]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files are or go")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder of its programs")
    parser.add_argument("--ik-llama-cpp", type=Path, metavar="DIR", help="folder of its programs")
    parser.add_argument("--isa", help="ours (default: the match of llama.cpp's backend)")
    parser.add_argument("--shapes", default=SHAPES, help="default: %(default)s")
    parser.add_argument("--types", default=TYPES, help="default: %(default)s")
    parser.add_argument("-p", type=parse_sizes, default=(512,), help="prompt lengths")
    parser.add_argument("-n", type=int, default=64, help="tokens to decode")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of all sides")
    parser.add_argument("--text", type=existing_file, default=DEFAULT_TEXT, help="what ours reads")
    parser.add_argument(
        "--attention-precision", default="auto", help="ours, as of edgeh2o bench (default: auto)"
    )
    parser.add_argument("--no-warmup", action="store_true", help="no warm-up run on any side")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser


def main() -> int:
    """Runs everything, prints a table of each quantity; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if min(args.r, args.n, *args.p) < 1:
        parser.error("-p, -n and -r are at least 1")
    isa = args.isa
    if isa is None and args.llama_cpp is not None:
        isa = LlamaCpp(args.llama_cpp, args.threads).isa()
    measurements = list(measure_shapes(isa, args))
    note = (
        f"Tokens/s, medians of {args.r} alternating runs (lowest to highest), {args.threads} "
        f"threads; decode of {args.n} tokens from an empty cache; ratios of ours to theirs."
    )
    write_report(
        args.output, [note, *format_tables(measurements)], [asdict(one) for one in measurements]
    )
    return 0


def measure_shapes(isa: str | None, args: argparse.Namespace) -> Iterator[ShapeMeasurement]:
    """Every file and length of a prompt, in rounds."""
    for shape in args.shapes.split(","):
        for type_name in args.types.split(","):
            model = find_or_make(args.folder, shape, type_name)
            for n_prompt in args.p:
                label = f"{model.name} {n_prompt} tokens"
                contestants = make_contestants(model, n_prompt, isa, args)
                yield ShapeMeasurement(
                    shape=shape,
                    type=type_name,
                    isa=isa or "default",
                    threads=args.threads,
                    n_prompt=n_prompt,
                    n_decode=args.n,
                    runs=take_turns(contestants, args.r, label, _describe_last),
                )


def find_or_make(folder: Path, shape: str, type_name: str) -> Path:
    """The file of a shape and type, which is made where it is missing."""
    path = folder / f"{shape}-{type_name.lower()}.gguf"
    if path.is_file():
        return path
    # Imported here, as what makes files of random weights takes NumPy and gguf.
    from tools.make_shape_model import write_shape_model

    print_progress(f"making {path}")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        write_shape_model(unfinished, shape, type_name)
    except ValueError as error:
        raise LlamaCppError(str(error)) from None
    return unfinished.replace(path)


def make_contestants(
    model: Path, n_prompt: int, isa: str | None, args: argparse.Namespace
) -> dict[str, Callable[[], Run]]:
    """What one run of each contestant is."""
    workload = Workload(n_prompt=n_prompt, n_decode=args.n)
    own = [
        *(sys.executable, "-m", "edgeh2o", "bench", str(model), "--modes", "dense"),
        *("-p", str(n_prompt), "-n", str(args.n), "-r", "1", "-t", str(args.threads)),
        *("-f", str(args.text), "-o", "json"),
        *("--attention-precision", args.attention_precision),
        *(["--isa", isa] if isa else []),
        *(["--no-warmup"] if args.no_warmup else []),
    ]
    contestants: dict[str, Callable[[], Run]] = {
        OURS: partial(_run, own, keeping_byte_code(), "median_tps")
    }
    for name, folder, more in (
        (LLAMA_CPP, args.llama_cpp, ["--no-warmup"] if args.no_warmup else []),
        (IK_LLAMA_CPP, args.ik_llama_cpp, ["-rtr", "1", "-w", str(int(not args.no_warmup))]),
    ):
        if folder is None:
            continue
        peer = LlamaCpp(folder, args.threads)
        arguments = [*peer.bench_arguments(model, workload, flash_attention=True), *more]
        command = peer.command("llama-bench", arguments)
        contestants[name] = partial(_run, command, peer.environment(), "avg_ts")
    return contestants


def _describe_last(runs: Sequence[Run]) -> str:
    return f"{runs[-1].prefill_tps:.0f} and {runs[-1].decode_tps:.1f}"


def _run(command: Sequence[str], environment: dict[str, str], rate: str) -> Run:
    cost, output = run_measured(command, environment)
    return Run(*parse_rates(output.decode(errors="replace"), rate), cost.peak_rss_bytes)


def parse_rates(output: str, rate: str) -> tuple[float, float]:
    """Tokens/s of prefill and decode from the JSON of ``edgeh2o bench`` or of llama-bench, whose
    tests have their speed in the field ``rate``."""
    try:
        document: Any = json.loads(output)
        tests = document["results"] if isinstance(document, dict) else document
        prefill, decode = (float(test[rate]) for test in tests)
    except (ValueError, KeyError, TypeError) as error:
        message = f"expected a test of prefill and one of decode: {error}\n{output[-2000:]}"
        raise LlamaCppError(message) from None
    return prefill, decode


# Heading, digits, and what a run has of it.
QUANTITIES: tuple[tuple[str, int, Callable[[Run], float]], ...] = (
    ("prefill, tokens/s", 0, lambda run: run.prefill_tps),
    ("decode, tokens/s", 1, lambda run: run.decode_tps),
    ("peak memory, MiB", 0, lambda run: run.peak_rss_bytes / MIB),
)


def format_tables(measurements: Sequence[ShapeMeasurement]) -> list[str]:
    """A table of each quantity: one row per file and length, medians with the lowest and highest
    run; a ratio is that of the medians, ours over theirs."""
    peers = [name for name in (LLAMA_CPP, IK_LLAMA_CPP) if name in measurements[0].runs]
    ratios = [cell for peer in peers for cell in (peer, "ratio")]
    tables = []
    for heading, digits, quantity in QUANTITIES:
        rows = []
        for one in measurements:
            samples = {name: [quantity(run) for run in runs] for name, runs in one.runs.items()}
            ours = statistics.median(samples[OURS])
            row: list[Any] = [f"{one.shape} {one.type}", f"{one.n_prompt:,}"]
            row.append(format_samples(samples[OURS], digits))
            for peer in peers:
                row.append(format_samples(samples[peer], digits))
                row.append(f"{ours / statistics.median(samples[peer]):.2f}x")
            rows.append(row)
        tables.append(markdown_table([heading, "prompt", OURS, *ratios], rows))
    return tables


if __name__ == "__main__":
    run_script(main)
