"""Tokens/s of vectors of texts by models whose tokens read those behind them, beside llama.cpp.

    python -m bench.encoders build/bin embedding.gguf --lengths 512 2048 --rounds 3

Random texts of each length, pooled by their mean; llama-bench reads as many tokens with
``--embeddings`` in one batch. The two take turns; numbers are medians, and the range of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeh2o import LLM

from .llama_cpp import LlamaCpp, parse_bench


def time_own(llm: LLM, length: int, seed: int) -> float:
    """Tokens/s of one text."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, llm.config.vocab_size, length).tolist()
    begun_at = time.perf_counter()
    llm.embed(ids, "mean")
    return length / (time.perf_counter() - begun_at)


def time_peer(llama_cpp: LlamaCpp, model: Path, length: int) -> float:
    """Tokens/s of one batch of llama-bench, after one to warm up."""
    size = str(length)
    arguments = [
        *("-m", str(model), "-p", size, "-n", "0", "-b", size, "-ub", size, "-r", "1"),
        *("-t", str(llama_cpp.threads), "--embeddings", "1", "-o", "json"),
    ]
    command = llama_cpp.command("llama-bench", arguments)
    environment = llama_cpp.environment()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=3600
    )
    return parse_bench(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="encoders", description=__doc__.split("\n")[0])
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    llama_cpp = LlamaCpp(options.llama_cpp, options.threads)
    print("| file | tokens | tokens/s | llama.cpp | ratio |")
    print("|---|---:|---:|---:|---:|")
    for model in options.models:
        for length in options.lengths:
            with LLM(model, context_size=length, threads=options.threads) as llm:
                time_own(llm, length, 0)
                ours, theirs = [], []
                for seed in range(options.rounds):
                    theirs.append(time_peer(llama_cpp, model, length))
                    ours.append(time_own(llm, length, seed))
            medians = [statistics.median(each) for each in (ours, theirs)]
            shown = [
                f"{median:,.0f} ({min(each):,.0f} to {max(each):,.0f})"
                for median, each in zip(medians, (ours, theirs), strict=True)
            ]
            ratio = medians[0] / medians[1]
            print(f"| {model.name} | {length:,} | {' | '.join(shown)} | {ratio:.1f}x |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
