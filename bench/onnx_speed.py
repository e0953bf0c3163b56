"""Prefill and decode speed of an ONNX model: edgeh2o against onnxruntime on the whole file.

    python -m bench.onnx_speed FOLDER -p 4096,8192 -n 32 -t 2

onnxruntime runs the uncut graph with one cache that past and present share, as onnxruntime-genai
does. The runners take turns; medians are printed. FOLDER is best made by
`edgeh2o export-onnx --last-logits-only`: the logits of all tokens would slow onnxruntime down.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o import LLM, DenseConfig, HeadwiseConfig
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.onnx.folder import find_onnx_model

from .reporting import run_script, write_report

Tokens = NDArray[np.int64]
# Seconds of the prefill and of the decoding.
Times = tuple[float, float]


class WholeModel:
    """One onnxruntime session over the graph as it is, with a shared cache in float32."""

    def __init__(self, path: Path, n_threads: int, max_context: int) -> None:
        from edgeh2o.onnx.packages import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n_threads
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._cache = {
            item.name: np.zeros((1, item.shape[1], max_context, item.shape[3]), np.float32)
            for item in self._session.get_inputs()
            if item.name.startswith("past_key_values")
        }

    def read(self, tokens: Tokens, n_past: int) -> NDArray[np.float32]:
        """Logits [vocab_size] after ``tokens``."""
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", tokens[None])
        binding.bind_cpu_input("attention_mask", np.ones((1, n_past + len(tokens)), np.int64))
        binding.bind_output("logits", "cpu")
        for name, rows in self._cache.items():
            present = name.replace("past_key_values", "present")
            place = ("cpu", 0, np.float32, rows.shape, rows.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(present, *place)
        self._session.run_with_iobinding(binding)
        logits: NDArray[np.float32] = binding.get_outputs()[0].numpy()[0, -1]
        return logits


def time_whole_model(model: WholeModel, prompt: Tokens, n_decode: int) -> Times:
    """One run of a prompt and greedy decoding."""
    start = time.perf_counter()
    logits = model.read(prompt, 0)
    middle = time.perf_counter()
    for i in range(n_decode):
        logits = model.read(np.array([logits.argmax()]), len(prompt) + i)
    return middle - start, time.perf_counter() - middle


def time_runner(runner: Any, prompt: Tokens, n_decode: int) -> Times:
    """The same by a runner of edgeh2o."""
    runner.reset()
    start = time.perf_counter()
    tokens = prompt.astype(np.int32)
    for first in range(0, len(tokens), runner.batch_size):
        part = tokens[first : first + runner.batch_size]
        logits = runner.prefill(part, is_last=first + len(part) == len(tokens))
    middle = time.perf_counter()
    for _ in range(n_decode):
        logits = runner.decode(int(logits.argmax()))
    return middle - start, time.perf_counter() - middle


def measure(
    folder: Path, n_prompt: int, n_decode: int, n_threads: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Tokens per second by runner: "prefill_tps" and "decode_tps", medians of ``rounds``."""
    rng = np.random.default_rng(0)
    whole = WholeModel(find_onnx_model(folder).model_path, n_threads, n_prompt + n_decode)
    times: dict[str, list[Times]] = {}
    with LLM(folder, attention=DenseConfig(), threads=n_threads) as llm:
        prompt = rng.integers(0, llm.config.vocab_size, n_prompt)
        size = n_prompt + n_decode
        dense = llm.start_runner(size)
        sparse = llm.start_runner(size, attention=HeadwiseConfig())
        runs: dict[str, Callable[[], Times]] = {
            "onnxruntime": lambda: time_whole_model(whole, prompt, n_decode),
            "edgeh2o dense": lambda: time_runner(dense, prompt, n_decode),
            "edgeh2o sparse": lambda: time_runner(sparse, prompt, n_decode),
        }
        for _ in range(rounds):
            for name, run in runs.items():
                times.setdefault(name, []).append(run())
    return {
        name: {
            "prefill_tps": n_prompt / statistics.median(t[0] for t in found),
            "decode_tps": n_decode / max(1e-9, statistics.median(t[1] for t in found)),
        }
        for name, found in times.items()
    }


def parse_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="bench.onnx_speed", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of an ONNX model")
    parser.add_argument("-p", "--n-prompt", default="4096", metavar="N,...")
    parser.add_argument("-n", "--n-decode", type=int, default=32, metavar="N")
    parser.add_argument("-t", "--threads", type=int, default=2, metavar="N")
    parser.add_argument("-r", "--rounds", type=int, default=3, metavar="N")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser.parse_args()


def main() -> int:
    """Command line entry; returns the exit code."""
    args = parse_arguments()
    results = {
        int(n): measure(args.folder, int(n), args.n_decode, args.threads, args.rounds)
        for n in args.n_prompt.split(",")
    }
    lines = [
        [
            *(n_prompt, name, f"{speed['prefill_tps']:,.0f}"),
            f"{speed['prefill_tps'] / found['onnxruntime']['prefill_tps']:.2f}x",
            f"{speed['decode_tps']:.1f}",
            f"{speed['decode_tps'] / found['onnxruntime']['decode_tps']:.2f}x",
        ]
        for n_prompt, found in results.items()
        for name, speed in found.items()
    ]
    header = ["prompt", "runner", "prefill tokens/s", "ratio", "decode tokens/s", "ratio"]
    note = f"Medians of {args.rounds} alternating rounds; {args.threads} threads."
    write_report(args.output, [note, markdown_table(header, lines)], results)
    return 0


if __name__ == "__main__":
    run_script(main)
