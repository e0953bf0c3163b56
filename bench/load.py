"""Times a cold process from its start to the first token, and its peak memory, on both sides.

The model file stays in the page cache, which an uncounted run of each side fills. Every run is a
new process, and the two take turns. The clock stops at the first byte of the answer on stdout. Peak
memory is the resident set, mapped pages of the model file included.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeh2o.config import PACKED_OFF
from edgeh2o.evaluation.reporting import format_samples, markdown_table

from .errors import LlamaCppError
from .llama_cpp import LlamaCpp
from .prefill import DEFAULT_TEXT, add_models, contest_parser, parse_sizes
from .reporting import existing_file, print_progress, run_script, write_report

MIB = 2**20
# ru_maxrss is in KiB on Linux and in bytes on macOS.
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
# Bytes of text that hold a token at most, to bound the search for a prompt of n tokens.
MAX_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """Seconds to the first byte on stdout, and the peak resident set in bytes."""

    first_token_s: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMeasurement:
    """Runs of both sides on one file, instruction set and prompt length."""

    model: str
    backend: str
    isa: str
    threads: int
    prompt_tokens: int
    ours: list[ProcessCost]
    theirs: list[ProcessCost]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_parser("python -m bench.load", __doc__)
    add_models(parser)
    parser.add_argument("-p", type=parse_sizes, default=(16,), help="prompt lengths in tokens")
    parser.add_argument("--text", type=existing_file, default=DEFAULT_TEXT, help="prompts begin it")
    parser.add_argument(
        "--packed-weights",
        default=PACKED_OFF,
        metavar="auto|off|FOLDER",
        help="as of edgeh2o; the uncounted run writes them",
    )
    return parser


def main() -> int:
    """Runs everything, prints one table; returns the exit code."""
    args = build_parser().parse_args()
    text = args.text.read_bytes().decode()
    measurements = []
    for folder in args.llama_cpp:
        peer = LlamaCpp(folder, args.threads)
        isa = args.isa or peer.isa()
        for model in args.models:
            for n_tokens in args.p:
                prompt = cut_prompt(peer, model, text, n_tokens)
                packed = args.packed_weights
                measurements.append(
                    measure_load(peer, model, isa, prompt, n_tokens, args, packed_weights=packed)
                )
    note = (
        f"Median of {args.r} alternating cold processes (lowest to highest); -b "
        f"{args.batch_size}, llama.cpp's -ub {args.chunk_size}."
    )
    write_report(
        args.output,
        [note, format_table(measurements)],
        [asdict(measurement) for measurement in measurements],
    )
    return 0


def cut_prompt(peer: LlamaCpp, model: Path, text: str, n_tokens: int) -> str:
    """The shortest beginning of ``text`` that has at least ``n_tokens`` tokens.

    Found with llama.cpp's tokenizer, to keep this process smaller than the ones it measures: the
    kernel counts a parent's peak memory as the child's when the child starts.
    """
    low, high = 0, min(len(text), MAX_TOKEN_BYTES * n_tokens)
    if len(peer.tokenize(model, text[:high])) < n_tokens:
        raise LlamaCppError(f"the text has less than {n_tokens} tokens; give a longer --text")
    while high - low > 1:
        middle = (low + high) // 2
        if len(peer.tokenize(model, text[:middle])) < n_tokens:
            low = middle
        else:
            high = middle
    return text[:high]


def keeping_byte_code() -> dict[str, str]:
    """The environment of edgeh2o: an installed package has its byte code, and a fresh checkout gets
    it in the first run."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def run_to_first_byte(command: Sequence[str], environment: Mapping[str, str]) -> ProcessCost:
    """Runs ``command`` to its end. Raises LlamaCppError if it fails or prints nothing."""
    return run_measured(command, environment)[0]


def run_measured(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[ProcessCost, bytes]:
    """What a run of ``command`` costs, and its stdout. Errors as of ``run_to_first_byte``."""
    with tempfile.TemporaryFile() as errors:
        started_at = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        with process.stdout:
            first_byte = process.stdout.read(1)
            first_token_s = time.perf_counter() - started_at
            output = first_byte + process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not first_byte:
            errors.seek(0)
            raise LlamaCppError(
                f"{command[0]} ended with code {process.returncode}\n"
                + errors.read().decode(errors="replace")[-2000:].rstrip()
            )
    peak_rss_bytes = usage.ru_maxrss * RSS_UNIT_BYTES
    own_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES
    if peak_rss_bytes <= own_peak_bytes:
        raise LlamaCppError("the measuring process is larger than the measured one; no result")
    return ProcessCost(first_token_s, peak_rss_bytes), output


def measure_load(
    peer: LlamaCpp,
    model: Path,
    isa: str,
    prompt: str,
    n_tokens: int,
    args: argparse.Namespace,
    *,
    packed_weights: str = PACKED_OFF,
) -> LoadMeasurement:
    """Rounds of cold processes of both sides with one prompt of ``n_tokens`` tokens.

    ``packed_weights`` as of edgeh2o; the uncounted run writes them.
    """
    ours, theirs = [], []
    context_size = -(-(n_tokens + 1) // args.chunk_size) * args.chunk_size
    batch = ["-b", str(args.batch_size)]
    own_environment = keeping_byte_code()
    with tempfile.TemporaryDirectory(prefix="edgeh2o-bench-") as folder:
        prompt_file = Path(folder) / "prompt.txt"
        prompt_file.write_bytes(prompt.encode())
        own_command = [
            *(sys.executable, "-m", "edgeh2o", "run", str(model), "-f", str(prompt_file)),
            *("-n", "1", "--temp", "0", "--quiet", "--ignore-eos", "-c", str(context_size)),
            *("-t", str(args.threads), "--isa", isa, *batch),
            *("--packed-weights", packed_weights),
        ]
        peer_command = peer.command(
            "llama-completion",
            [
                *peer.completion_arguments(model, prompt_file, 1, context_size=context_size),
                *("--ignore-eos", *batch, "-ub", str(args.chunk_size)),
            ],
        )
        run_to_first_byte(own_command, own_environment)
        run_to_first_byte(peer_command, peer.environment())
        for round_number in range(1, args.r + 1):
            ours.append(run_to_first_byte(own_command, own_environment))
            theirs.append(run_to_first_byte(peer_command, peer.environment()))
            print_progress(f"{model.name} {isa} {n_tokens} tokens round {round_number}/{args.r}")
    return LoadMeasurement(
        model=model.name,
        backend=peer.folder.name if args.isa else peer.backend(),
        isa=isa,
        threads=args.threads,
        prompt_tokens=n_tokens,
        ours=ours,
        theirs=theirs,
    )


def format_table(measurements: Sequence[LoadMeasurement]) -> str:
    """One row per file, instruction set and prompt; ratios are ours over theirs."""
    header = ["file", "ISA (llama.cpp's backend)", "threads", "prompt tokens"]
    header += ["edgeh2o first token s", "llama.cpp first token s", "ratio"]
    header += ["edgeh2o peak RSS MiB", "llama.cpp peak RSS MiB", "ratio"]
    rows = []
    for measurement in measurements:
        sides = (measurement.ours, measurement.theirs)
        seconds = [[cost.first_token_s for cost in side] for side in sides]
        mebibytes = [[cost.peak_rss_bytes / MIB for cost in side] for side in sides]
        rows.append(
            [
                measurement.model,
                f"{measurement.isa} ({measurement.backend})",
                measurement.threads,
                measurement.prompt_tokens,
                *(format_samples(side, digits=2) for side in seconds),
                f"{_ratio_of_medians(*seconds):.2f}x",
                *(format_samples(side) for side in mebibytes),
                f"{_ratio_of_medians(*mebibytes):.2f}x",
            ]
        )
    return markdown_table(header, rows)


def _ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


if __name__ == "__main__":
    run_script(main)
