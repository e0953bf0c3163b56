"""What LoRA adapters cost: a step of several sequences whose adapters count alike, or do not.

    python -m bench.lora MODEL [--rank 16] [--sequences 4] [-d TOKENS] [-r ROUNDS] [-t THREADS]

Two random adapters are made for all matrices of the layers of a GGUF file. Kinds of steps take
turns, and a prompt is read by each. Needs no llama.cpp.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.formats.gguf_header import TensorInfo
from edgeh2o.formats.gguf_writer import write_gguf
from edgeh2o.formats.lora_file import A_SUFFIX, ADAPTER, ALPHA_KEY, B_SUFFIX, KIND_KEY, TYPE_KEY
from edgeh2o.formats.model_cache import resolve_model
from edgeh2o.lora_config import LoraAdapter
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModel, NativeModelFile

from .reporting import run_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgeh2o import _core

# By name what the first sequences, and every second one, have of both adapters.
KINDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "both of scale 0": ((0, 0), (0, 0)),
    "one of scale 1": ((1, 0), (1, 0)),
    "one of scale 0.5": ((0.5, 0), (0.5, 0)),
    "one, of scale 1 or 0.5": ((1, 0), (0.5, 0)),
    "one or none": ((1, 0), (0, 0)),
    "one or the other": ((1, 0), (0, 1)),
    "both": ((1, 1), (1, 1)),
}
NONE = "no adapters loaded"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=4, help="that share a step")
    parser.add_argument("-d", "--depth", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("-r", "--rounds", type=int, default=20)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of the processor, with -t 1: on a machine that others use too",
    )
    return parser


def write_random_adapter(model: NativeModelFile, path: Path, rank: int, seed: int) -> None:
    """One for all matrices of the model's layers, in half precision."""
    rng, tensors, values = np.random.default_rng(seed), [], {}
    for info in model.tensors:
        if not info.name.startswith("blk.") or len(info.shape) < 2:
            continue
        cols, rows, *stack = info.shape
        for suffix, shape in ((A_SUFFIX, (cols, rank, *stack)), (B_SUFFIX, (rank, rows, *stack))):
            tensor = TensorInfo(f"{info.name}{suffix}", "F16", shape, 2 * int(np.prod(shape)), 0)
            tensors.append(tensor)
            values[tensor.name] = (rng.standard_normal(shape) / 64).astype(np.float16).tobytes()
    metadata = {
        "general.architecture": model.config.architecture,
        TYPE_KEY: ADAPTER,
        KIND_KEY: "lora",
        ALPHA_KEY: float(rank),
    }
    write_gguf(path, metadata, tensors, lambda info: [values[info.name]])


def load(path: Path, lora: tuple[LoraAdapter, ...]) -> NativeModel:
    """The model with adapters."""
    with NativeModelFile(path, lora=lora) as file:
        return file.load()


class Sequences:
    """Prompts that were read by one kind of scales, and go on together."""

    def __init__(
        self, model: NativeModel, kind: tuple[tuple[float, ...], ...], args: argparse.Namespace
    ) -> None:
        self._tokens = np.arange(args.depth, dtype=np.int32) % 1000 + 10
        self.runners: list[_core.Sequence] = [
            model.start_session(
                DenseConfig(),
                SessionShape(
                    max_context=args.depth + 2 * args.rounds + 8,
                    batch_size=args.depth,
                    chunk_size=args.depth,
                    cache_type="f16",
                    threads=args.threads,
                    adapter_scales=kind[i % 2] if kind else (),
                ),
            )
            for i in range(args.sequences)
        ]
        for runner in self.runners[1:]:
            runner.prefill(self._tokens, is_last=True)

    def read(self) -> None:
        """The first one reads its prompt."""
        self.runners[0].reset()
        self.runners[0].prefill(self._tokens, is_last=True)

    def step(self) -> None:
        """All go on by a token, together."""
        token = np.array([7], np.int32)
        self.runners[0].workspace.forward([(runner, token, None) for runner in self.runners])

    def step_apart(self) -> None:
        """Those of the same scales go on together."""
        token = np.array([7], np.int32)
        for part in (self.runners[::2], self.runners[1::2]):
            if part:
                part[0].workspace.forward([(runner, token, None) for runner in part])


def measure(
    kinds: dict[str, Sequences], n_rounds: int, clock: Callable[[], float]
) -> list[list[str]]:
    """A row per kind: medians of milliseconds, and of what they are of those without adapters."""

    def measured(call: Callable[[], None]) -> float:
        start = clock()
        call()
        return 1e3 * (clock() - start)

    times: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(n_rounds):
        for name, each in kinds.items():
            calls = (each.read, each.step, each.step_apart)
            times[name].append([measured(call) for call in calls])
    bare = [median(column) for column in zip(*times[NONE], strict=True)]
    table = []
    for name, rounds in times.items():
        row = [name]
        for column, own in zip(zip(*rounds, strict=True), bare, strict=True):
            row.append(f"{median(column):.2f} ({median(column) / own:.3f}x)")
        table.append(row)
    return table


def main() -> int:
    """Prints a table; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if min(args.rank, args.sequences, args.depth, args.rounds, args.threads) < 1:
        parser.error("all numbers are at least 1")
    if args.cpu_time and args.threads > 1:
        parser.error("--cpu-time is that of one thread: give -t 1")
    path = resolve_model(args.model)
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"{seed}.gguf") for seed in range(2)]
        with NativeModelFile(path) as model:
            for seed, file in enumerate(files):
                write_random_adapter(model, file, args.rank, seed)
        bare, adapted = load(path, ()), load(path, tuple(LoraAdapter(str(f)) for f in files))
    kinds = {NONE: Sequences(bare, (), args)}
    kinds |= {name: Sequences(adapted, kind, args) for name, kind in KINDS.items()}
    for each in kinds.values():  # warm-up
        each.read()
        each.step()
    rows = measure(kinds, args.rounds, time.thread_time if args.cpu_time else time.perf_counter)
    print(f"Milliseconds, medians of {args.rounds}; adapters of rank {args.rank}:\n")
    columns = ["adapters", f"{args.depth} tokens of a prompt"]
    columns += [f"a step of {args.sequences} sequences", "in two steps"]
    print(markdown_table(columns, rows))
    return 0


if __name__ == "__main__":
    run_script(main)
