"""The project's speed targets in one table: ours, llama.cpp's, their ratio, and the aim.

FOLDER holds the same model in several types: files whose names end in q4_0.gguf, q4_1.gguf,
q8_0.gguf and q4_k_m.gguf, in any case; a type without a file is left out. The aims are ratios to
the faster of llama.cpp's runs with flash attention off and on, on the same file, instruction set
and threads; medians of alternating runs. A run of llama.cpp that is less than two thirds as fast as
its other one in the first round is left out of the further rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeh2o.evaluation.reporting import format_samples, markdown_table
from edgeh2o.evaluation.throughput import Workload

from .errors import LlamaCppError
from .llama_cpp import LlamaCpp
from .load import MIB, LoadMeasurement, cut_prompt, measure_load
from .prefill import DEFAULT_TEXT, THEIRS, alternate, contest_parser, make_run
from .reporting import existing_file, run_script, write_report


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """Our tokens/s should be at least so many times llama.cpp's, with its AVX2 or its AVX-512."""

    name: str
    file_type: str
    contestant: str  # of ours
    workload: Workload
    avx2: float
    avx512: float

    def aim(self, isa: str) -> float:
        """The least ratio with an instruction set of ours."""
        return self.avx512 if isa.startswith("avx512") else self.avx2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; a ratio is ours over theirs."""

    name: str
    file: str
    isa: str
    unit: str
    ours: list[float]
    theirs: list[float]
    least_ratio: float | None = None
    greatest_ratio: float | None = None

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def is_met(self) -> bool:
        """Whether the ratio is on the right side of the aim."""
        if self.least_ratio is not None:
            return self.ratio >= self.least_ratio
        return self.greatest_ratio is None or self.ratio <= self.greatest_ratio


SPEED_TARGETS = (
    SpeedTarget("prefill 512, dense", "q4_0", "dense", Workload(n_prompt=512), 1.8, 3.0),
    SpeedTarget("prefill 4,096, sparse", "q4_0", "sparse", Workload(n_prompt=4096), 3.0, 5.0),
    SpeedTarget("prefill 8,192, sparse", "q4_0", "sparse", Workload(n_prompt=8192), 4.0, 8.0),
    SpeedTarget("prefill 4,096, dense", "q4_0", "dense", Workload(n_prompt=4096), 1.5, 2.0),
    SpeedTarget("prefill 512, dense", "q4_1", "dense", Workload(n_prompt=512), 1.8, 2.0),
    SpeedTarget("prefill 512, dense", "q8_0", "dense", Workload(n_prompt=512), 1.8, 2.0),
    SpeedTarget("prefill 512, dense", "q4_k_m", "dense", Workload(n_prompt=512), 1.8, 2.0),
    SpeedTarget("decode", "q4_0", "dense", Workload(n_decode=64), 1.1, 1.2),
    SpeedTarget(
        "decode after 8,000, dense", "q4_0", "dense", Workload(n_decode=64, depth=8000), 1.1, 1.2
    ),
    SpeedTarget(
        "decode after 8,000, sparse", "q4_0", "sparse", Workload(n_decode=64, depth=8000), 2.0, 4.0
    ),
)
COLD_START_TOKENS, MEMORY_TOKENS = 16, 4096
# Of the faster of the peer's two ways; noise is less than that.
LAG = 2 / 3


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_parser("python -m bench.targets", __doc__)
    parser.add_argument("models", type=Path, metavar="FOLDER", help="folder of GGUF files")
    parser.add_argument("--text", type=existing_file, default=DEFAULT_TEXT)
    parser.add_argument("--only", default="", help="only targets whose name has this text")
    parser.set_defaults(no_warmup=False)
    return parser


def main() -> int:
    """Runs everything, prints one table; returns the exit code."""
    args = build_parser().parse_args()
    rows = [row for folder in args.llama_cpp for row in measure_targets(folder, args)]
    note = f"Medians of {args.r} alternating runs (lowest to highest); {args.threads} threads."
    write_report(args.output, [note, format_rows(rows)], [_to_record(row) for row in rows])
    return 0


def measure_targets(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Every target with one folder of llama.cpp's programs."""
    peer = LlamaCpp(folder, args.threads)
    isa = args.isa or peer.isa()
    # A program that is missing ends the comparison here and not after its long runs.
    loads = list(_load_prompts(peer, args))
    for target in SPEED_TARGETS:
        model = find_model(args.models, target.file_type)
        if model is None or args.only not in target.name:
            continue
        names = (target.contestant, *THEIRS)
        runs = {name: make_run(name, model, peer, isa, args) for name in names}
        label = f"{model.name} {isa} {target.name}"
        samples = run_contest(runs, target.workload, args.r, label)
        yield Row(
            name=target.name,
            file=model.name,
            isa=isa,
            unit="tokens/s",
            ours=samples[target.contestant],
            theirs=max((samples[name] for name in THEIRS), key=statistics.median),
            least_ratio=target.aim(isa),
        )
    for name, model, n_tokens, prompt in loads:
        yield _load_row(name, measure_load(peer, model, isa, prompt, n_tokens, args))


def _load_prompts(peer: LlamaCpp, args: argparse.Namespace) -> Iterator[tuple[str, Path, int, str]]:
    """Name, file, tokens and prompt of the targets that whole processes are measured for. Raises
    LlamaCppError if a program for them is missing."""
    model = find_model(args.models, "q4_0")
    if model is None:
        return
    for name, n_tokens in (("first token, cold", COLD_START_TOKENS), ("peak RSS", MEMORY_TOKENS)):
        if args.only in name:
            peer.command("llama-completion", [])
            prompt = cut_prompt(peer, model, args.text.read_bytes().decode(), n_tokens)
            yield name, model, n_tokens, prompt


def run_contest(
    runs: Mapping[str, Callable[[Workload], float]], workload: Workload, n_rounds: int, label: str
) -> dict[str, list[float]]:
    """Tokens/s by contestant, in alternating rounds; the peer's way that lags far runs once."""
    samples = alternate(runs, workload, 1, label)
    fastest = max(samples[name][0] for name in THEIRS)
    lagging = [name for name in THEIRS if samples[name][0] < LAG * fastest]
    kept = {name: run for name, run in runs.items() if name not in lagging}
    for name, more in alternate(kept, workload, n_rounds - 1, f"{label}, further").items():
        samples[name] += more
    return samples


def find_model(folder: Path, file_type: str) -> Path | None:
    """The file of a type, None if there is none. Raises LlamaCppError for two of one type."""
    files = [p for p in folder.glob("*.gguf") if p.name.lower().endswith(f"{file_type}.gguf")]
    if len(files) > 1:
        raise LlamaCppError(f"{folder} has more than one file of type {file_type}")
    return files[0] if files else None


def _load_row(name: str, measurement: LoadMeasurement) -> Row:
    is_memory = name == "peak RSS"
    ours, theirs = (
        [cost.peak_rss_bytes / MIB if is_memory else cost.first_token_s for cost in side]
        for side in (measurement.ours, measurement.theirs)
    )
    return Row(
        name=f"{name}, {measurement.prompt_tokens:,} tokens",
        file=measurement.model,
        isa=measurement.isa,
        unit="MiB" if is_memory else "s",
        ours=ours,
        theirs=theirs,
        greatest_ratio=1.0,
    )


def format_rows(rows: list[Row]) -> str:
    """A Markdown table."""
    header = ["target", "file", "ISA", "unit", "edgeh2o", "llama.cpp", "ratio", "aim", "met"]
    lines = []
    for row in rows:
        digits = 2 if row.unit == "s" else 0
        aim = f">= {row.least_ratio}x" if row.least_ratio else f"<= {row.greatest_ratio}x"
        sides = [format_samples(side, digits=digits) for side in (row.ours, row.theirs)]
        lines.append(
            [
                *(row.name, row.file, row.isa, row.unit, *sides),
                *(f"{row.ratio:.2f}x", aim, "yes" if row.is_met else "no"),
            ]
        )
    return markdown_table(header, lines)


def _to_record(row: Row) -> dict[str, Any]:
    return {
        "target": row.name,
        "file": row.file,
        "isa": row.isa,
        "unit": row.unit,
        "ours": row.ours,
        "llama_cpp": row.theirs,
        "ratio": row.ratio,
        "is_met": row.is_met,
    }


if __name__ == "__main__":
    run_script(main)
