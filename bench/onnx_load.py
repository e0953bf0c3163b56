"""Times a cold process from its start to the first token of an ONNX model, and its peak memory.

onnxruntime-genai reads the same folder and the same prompt by its interface for Python. As in
``bench.load`` the files stay in the page cache, which an uncounted run of each side fills; every
run is a new process, and the two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeh2o.evaluation.reporting import format_samples, markdown_table

from .load import MIB, ProcessCost, keeping_byte_code, run_to_first_byte
from .reporting import print_progress, run_script, write_report

DEFAULT_PROMPT = "The capital of France is"
CONTEXT = 512  # of both sides, whose caches would else be as long as the model was trained for
# What the peer does with a folder and a prompt, to its first token.
PEER_PROGRAM = """
import os
import sys
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime_genai as og

folder, prompt, n_threads, context = sys.argv[1:]
config = og.Config(folder)
options = '{"session_options": {"intra_op_num_threads": %s}}' % n_threads
config.overlay('{"model": {"decoder": %s}}' % options)
model = og.Model(config)
tokenizer = og.Tokenizer(model)
ids = tokenizer.encode(prompt)
settings = og.GeneratorParams(model)
settings.set_search_options(max_length=int(context), do_sample=False)
generator = og.Generator(model, settings)
generator.append_tokens(ids)
generator.generate_next_token()
text = tokenizer.create_stream().decode(generator.get_next_tokens()[0])
print(text or " ", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxLoadMeasurement:
    """Runs of both sides on one folder; none of a peer that was not given."""

    folder: str
    threads: int
    ours: list[ProcessCost]
    theirs: list[ProcessCost]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.onnx_load", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of ONNX models")
    parser.add_argument(
        "--genai",
        metavar="PYTHON",
        help="a Python with onnxruntime-genai; left out, edgeh2o is measured alone",
    )
    parser.add_argument("-t", "--threads", type=int, default=1, metavar="N")
    parser.add_argument("-r", type=int, default=7, metavar="N", help="rounds")
    parser.add_argument("-p", "--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser


def measure(folder: Path, args: argparse.Namespace) -> OnnxLoadMeasurement:
    """Rounds of cold processes of both sides."""
    environment = keeping_byte_code()
    ours: list[ProcessCost] = []
    theirs: list[ProcessCost] = []
    with tempfile.TemporaryDirectory(prefix="edgeh2o-bench-") as scratch:
        program = Path(scratch) / "peer.py"
        program.write_text(PEER_PROGRAM)
        own = [sys.executable, "-m", "edgeh2o", "run", str(folder), "-p", args.prompt]
        own += ["-n", "1", "--temp", "0", "--quiet", "--ignore-eos", "-t", str(args.threads)]
        own += ["-c", str(CONTEXT)]
        sides = [(own, ours)]
        if args.genai is not None:
            peer = [args.genai, str(program), str(folder), args.prompt, str(args.threads)]
            peer.append(str(CONTEXT))
            sides.append((peer, theirs))
        for command, _ in sides:
            run_to_first_byte(command, environment)
        for i in range(args.r):
            for command, costs in sides:
                costs.append(run_to_first_byte(command, environment))
            print_progress(f"{folder.name} round {i + 1}/{args.r}")
    return OnnxLoadMeasurement(folder=folder.name, threads=args.threads, ours=ours, theirs=theirs)


def format_table(measurements: list[OnnxLoadMeasurement]) -> str:
    """One row per folder; ratios are ours over theirs."""
    header = ["folder", "threads", "edgeh2o first token s", "onnxruntime-genai s", "ratio"]
    header += ["edgeh2o peak RSS MiB", "onnxruntime-genai MiB", "ratio"]
    rows = []
    for found in measurements:
        row: list[object] = [found.folder, found.threads]
        for unit, digits in (("first_token_s", 2), ("peak_rss_bytes", 0)):
            divisor = 1 if unit == "first_token_s" else MIB
            own, peer = (
                [getattr(cost, unit) / divisor for cost in side]
                for side in (found.ours, found.theirs)
            )
            row.append(format_samples(own, digits=digits))
            if peer:
                ratio = statistics.median(own) / statistics.median(peer)
                row += [format_samples(peer, digits=digits), f"{ratio:.2f}x"]
            else:
                row += ["", ""]
        rows.append(row)
    return markdown_table(header, rows)


def main() -> int:
    """Runs everything, prints one table; returns the exit code."""
    args = build_parser().parse_args()
    measurements = [measure(folder, args) for folder in args.folders]
    note = f"Median of {args.r} alternating cold processes (lowest to highest)."
    records = [asdict(measurement) for measurement in measurements]
    write_report(args.output, [note, format_table(measurements)], records)
    return 0


if __name__ == "__main__":
    run_script(main)
