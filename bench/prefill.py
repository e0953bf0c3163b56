"""Times prefill and decode of edgeh2o and llama.cpp on the same files, threads and ISA.

Every run is a process of its own that loads the model, warms up and measures once, without
tokenisation and sampling. The contestants take turns, so that a slow minute of the machine falls
on all of them. edgeh2o reads the tokens of a real text, llama-bench random ones.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edgeh2o.errors import EdgeH2OError
from edgeh2o.evaluation.reporting import format_samples, markdown_table
from edgeh2o.evaluation.throughput import Workload

from .llama_cpp import LlamaCpp
from .reporting import existing_file, print_progress, run_script, write_report

DEFAULT_TEXT = Path(__file__).parent.parent / "examples" / "long_prompt.txt"
_Sample = TypeVar("_Sample")

OWN = ("sparse", "dense")
THEIRS = ("fa off", "fa on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Samples in tokens/s by contestant: ``sparse`` and ``dense`` are ours, the others theirs."""

    model: str
    backend: str
    isa: str
    threads: int
    workload: Workload
    samples: dict[str, list[float]]

    def median(self, contestant: str) -> float | None:
        """Median tokens/s, None for a contestant that did not take part."""
        samples = self.samples.get(contestant)
        return statistics.median(samples) if samples else None

    def ratio(self, contestant: str) -> float | None:
        """Median of ours over llama.cpp's best median."""
        ours = self.median(contestant)
        theirs = [median for name in THEIRS if (median := self.median(name)) is not None]
        return ours / max(theirs) if ours is not None and theirs else None


def contest_parser(
    prog: str, description: str | None, *, needs_peer: bool = True
) -> argparse.ArgumentParser:
    """The options of every script that lets both sides take turns."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        required=needs_peer,
        default=[],
        action="append",
        metavar="DIR",
        help="folder of the programs with the backend to compare; may be given several times",
    )
    parser.add_argument("-r", type=int, default=5, help="rounds")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of both sides")
    parser.add_argument("-b", "--batch-size", type=int, default=4096)
    parser.add_argument("-ub", "--chunk-size", type=int, default=1024, help="llama.cpp's only")
    parser.add_argument("--isa", help="ours (default: the match of each folder's backend)")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    parser.add_argument(
        "--llama-bench-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="more arguments of llama-bench, such as '-rtr 1' of ik_llama.cpp",
    )
    return parser


def add_models(parser: argparse.ArgumentParser) -> None:
    """The files to compare on."""
    parser.add_argument("models", nargs="+", type=existing_file, metavar="MODEL", help="GGUF file")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_parser("python -m bench.prefill", __doc__)
    add_models(parser)
    parser.add_argument("-p", type=parse_sizes, default=(512, 4096, 8192), help="prompt lengths")
    parser.add_argument("-n", type=int, default=0, help="tokens to decode (default: no decoding)")
    parser.add_argument("-d", type=parse_sizes, default=(0,), help="depths of the decoding")
    parser.add_argument(
        "--text", type=existing_file, default=DEFAULT_TEXT, help="repeated if too short"
    )
    parser.add_argument(
        "--contestants",
        default=",".join((*OWN, *THEIRS)),
        help="which to run (default: %(default)s)",
    )
    parser.add_argument("--no-warmup", action="store_true", help="no warm-up run on either side")
    return parser


def parse_sizes(text: str) -> tuple[int, ...]:
    """``512,4096`` as numbers; empty text gives none."""
    try:
        return tuple(int(field) for field in text.split(",") if field)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers such as 512,4096, got {text!r}"
        ) from None


def main() -> int:
    """Runs everything, prints one table; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    contestants = [name.strip() for name in args.contestants.split(",")]
    unknown = sorted(set(contestants) - {*OWN, *THEIRS})
    if unknown or args.r < 1:
        parser.error("--contestants are " + ", ".join((*OWN, *THEIRS)) + "; -r is at least 1")
    workloads = [Workload(n_prompt=n) for n in args.p]
    if args.n:
        workloads += [Workload(n_decode=args.n, depth=depth) for depth in args.d]
    measurements = [
        measurement
        for folder in args.llama_cpp
        for measurement in _measure_folder(folder, workloads, contestants, args)
    ]
    write_report(
        args.output,
        [_explain(args), format_table(measurements)],
        [_to_record(measurement) for measurement in measurements],
    )
    return 0


def _measure_folder(
    folder: Path, workloads: list[Workload], contestants: list[str], args: argparse.Namespace
) -> Iterator[Measurement]:
    peer = LlamaCpp(folder, args.threads)
    # With --isa any fork's llama-bench will do, which may name no backend.
    backend = folder.name if args.isa else peer.backend()
    isa = args.isa or peer.isa()
    for model in args.models:
        runs = {name: make_run(name, model, peer, isa, args) for name in contestants}
        for workload in workloads:
            yield Measurement(
                model=model.name,
                backend=backend,
                isa=isa,
                threads=args.threads,
                workload=workload,
                samples=alternate(runs, workload, args.r, f"{model.name} {isa} {workload.name}"),
            )


def alternate(
    runs: Mapping[str, Callable[[Workload], float]], workload: Workload, n_rounds: int, label: str
) -> dict[str, list[float]]:
    """Tokens/s by contestant, one of each per round."""
    turns = {name: partial(run, workload) for name, run in runs.items()}
    return take_turns(turns, n_rounds, label, format_samples)


def take_turns(
    runs: Mapping[str, Callable[[], _Sample]],
    n_rounds: int,
    label: str,
    describe: Callable[[Sequence[_Sample]], str],
) -> dict[str, list[_Sample]]:
    """Samples by contestant, one of each per round; what there is of each is told after a round."""
    samples: dict[str, list[_Sample]] = {name: [] for name in runs}
    for round_number in range(1, n_rounds + 1):
        for name, run in runs.items():
            samples[name].append(run())
        so_far = ", ".join(f"{name} {describe(values)}" for name, values in samples.items())
        print_progress(f"{label} round {round_number}/{n_rounds}: {so_far}")
    return samples


def make_run(
    contestant: str, model: Path, peer: LlamaCpp | None, isa: str, args: argparse.Namespace
) -> Callable[[Workload], float]:
    """A function that gives the tokens/s of one run of a contestant; ours need no peer."""
    if contestant in OWN or peer is None:
        return partial(_run_own, contestant, model, isa, args)
    return partial(
        peer.time,
        model,
        batch_size=args.batch_size,
        chunk_size=args.chunk_size,
        flash_attention=contestant == "fa on",
        warm_up=not args.no_warmup,
        more_arguments=args.llama_bench_args,
    )


def _run_own(
    contestant: str, model: Path, isa: str, args: argparse.Namespace, workload: Workload
) -> float:
    """Tokens/s of one run of ours in a process of its own."""
    command = [
        *(sys.executable, "-m", "edgeh2o", "bench", str(model), "--modes", contestant),
        *("--isa", isa, "-t", str(args.threads), "-f", str(args.text), "-o", "json", "-r", "1"),
        *("-b", str(args.batch_size)),  # chunks as the product chooses them
        *("-p", str(workload.n_prompt), "-n", str(workload.n_decode), "-d", str(workload.depth)),
        *(["--no-warmup"] if args.no_warmup else []),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise EdgeH2OError(f"edgeh2o bench failed\n{result.stderr.rstrip()}")
    return parse_own_bench(result.stdout)


def parse_own_bench(stdout: str) -> float:
    """Tokens/s from the JSON of ``edgeh2o bench`` with one test."""
    (record,) = json.loads(stdout)["results"]
    return float(record["median_tps"])


def format_table(measurements: list[Measurement]) -> str:
    """One row per file, instruction set and test; medians with the lowest and highest sample."""
    header = ["file", "ISA (llama.cpp's backend)", "threads", "test"]
    header += ["edgeh2o sparse", "edgeh2o dense", "llama.cpp fa off", "llama.cpp fa on"]
    header += ["sparse / best", "dense / best"]
    rows = []
    for measurement in measurements:
        speeds = [measurement.samples.get(name) for name in (*OWN, *THEIRS)]
        ratios = [measurement.ratio(name) for name in OWN]
        rows.append(
            [
                measurement.model,
                f"{measurement.isa} ({measurement.backend})",
                measurement.threads,
                measurement.workload.name,
                *("-" if samples is None else format_samples(samples) for samples in speeds),
                *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            ]
        )
    return markdown_table(header, rows)


def _explain(args: argparse.Namespace) -> str:
    return (
        f"Tokens/s, median of {args.r} alternating runs (lowest to highest); -b {args.batch_size} "
        f"llama.cpp's -ub {args.chunk_size}; best is the faster of llama.cpp's two."
    )


def _to_record(measurement: Measurement) -> dict[str, Any]:
    return {
        "model": measurement.model,
        "isa": measurement.isa,
        "llama_cpp_backend": measurement.backend,
        "threads": measurement.threads,
        "test": measurement.workload.name,
        "samples_tps": measurement.samples,
        "median_tps": {name: measurement.median(name) for name in measurement.samples},
        "ratio_to_best": {name: measurement.ratio(name) for name in OWN},
    }


if __name__ == "__main__":
    run_script(main)
