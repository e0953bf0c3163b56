"""What the choice of memory sets costs beside the attention itself, by a sampling profiler.

    python -m bench.attention_cost model.gguf --text wiki.txt --ctx 4096 --attention headwise

Needs Linux's ``perf``. A child process reads the prompt several times on one thread; samples are
counted by function. Shares are of all samples in the attention, so the rest of the model, loading
and Python do not matter, and other load on the machine changes them little.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edgeh2o import LLM, PrefillConfig
from edgeh2o.attention.registry import find_sparse_attention, sparse_attention_algorithms
from edgeh2o.errors import EdgeH2OError
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.evaluation.windows import cut_windows

from .reporting import existing_file, run_script, write_report

# Parts of the attention by the functions that do the work. The products of quantised weights have
# functions of their own; those of F16 and F32 files share `multiply_panel` with no one.
PARTS = {
    "scores and values": r"multiply_panel<|attention_tile_f32|attention_scores|attention_values",
    "softmax and merge": r"attention_softmax|merge_softmax_f32|softmax_factors_f32|blend_row",
    "column sums": r"column_sums_f32|observe_chunk|::observe_",
    "gather": r"pack_keys|pack_values|MemoryRounds::",
    "landmarks": r"Landmarks::|add_rows<",
    "selection": r"HeavyHitters::|introselect|(Headwise|H2O)Policy::|Page(Recall|Scores)::",
}
# What the target of at most 10 % is about.
OVERHEAD = ("gather", "landmarks", "selection")
_LINE = re.compile(r"^\s*([\d.]+)%\s+(?:\[.\]\s+)?(.+?)\s*$")


def sum_parts(report: str) -> dict[str, float]:
    """Percent of all samples by part, from ``perf report --stdio --sort symbol``."""
    sums = dict.fromkeys(PARTS, 0.0)
    for line in report.splitlines():
        if found := _LINE.match(line):
            for part, pattern in PARTS.items():
                if re.search(pattern, found[2]):
                    sums[part] += float(found[1])
                    break
    return sums


def shares(sums: Mapping[str, float]) -> dict[str, float]:
    """Every part in percent of the attention. Raises EdgeH2OError if there are no samples of it."""
    total = sum(sums.values())
    if total == 0:
        raise EdgeH2OError("no sample lies in the attention; use a longer --ctx or more --rounds")
    return {part: 100 * value / total for part, value in sums.items()}


def record(args: argparse.Namespace) -> str:
    """The report of a child process that reads the prompt."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        child = [sys.executable, "-m", "bench.attention_cost", *sys.argv[1:], "--read"]
        try:
            subprocess.run(
                ["perf", "record", "-q", "-F", "997", "-o", data, *child],
                check=True,
                capture_output=True,
            )
            return subprocess.run(
                ["perf", "report", "-i", data, "--stdio", "--sort", "symbol"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        except FileNotFoundError:
            raise EdgeH2OError("perf is not installed; it comes with linux-tools") from None
        except subprocess.CalledProcessError as error:
            message = error.stderr if isinstance(error.stderr, str) else error.stderr.decode()
            lines = message.strip().splitlines() or ["no message"]
            raise EdgeH2OError(f"perf failed: {lines[-1]}") from None


def read(args: argparse.Namespace) -> None:
    """What the child does."""
    attention = find_sparse_attention(args.attention)()
    prefill = PrefillConfig(chunk_size=args.chunk_size)
    with LLM(args.model, threads=1, attention=attention, prefill=prefill) as llm:
        text = args.text.read_text(encoding="utf-8")
        window = cut_windows(llm, text, args.ctx, 1)[0]
        runner = llm.start_runner(args.ctx)
        for _ in range(args.rounds):
            prefill_prompt(runner, window)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=existing_file, metavar="MODEL")
    parser.add_argument("--text", type=existing_file, required=True, help="UTF-8 text to read")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3, help="how often it is read")
    parser.add_argument(
        "--attention", choices=sorted(sparse_attention_algorithms()), default="headwise"
    )
    parser.add_argument("-ub", "--chunk-size", type=int, default=PrefillConfig().chunk_size)
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Prints the shares; returns the exit code."""
    args = parse_arguments()
    if args.read:
        read(args)
        return 0
    parts = shares(sum_parts(record(args)))
    overhead = sum(parts[part] for part in OVERHEAD)
    rows = [[part, f"{share:.1f}"] for part, share in parts.items()]
    rows.append(["selection, gather and landmarks together", f"{overhead:.1f}"])
    header = [f"{args.attention}, {args.ctx} tokens", "% of the attention"]
    write_report(args.output, [markdown_table(header, rows)], {**parts, "overhead": overhead})
    return 0


if __name__ == "__main__":
    run_script(main)
