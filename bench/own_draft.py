"""What a drafted token of a model's own layer (MTP) costs, in calls of the model, and a prompt.

    python -m bench.own_draft MODEL [-d TOKENS] [-r ROUNDS]

The layer's logits are of the first tokens of the vocabulary; those of all are measured beside.
Needs no llama.cpp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import numpy as np

from edgeh2o import _core
from edgeh2o.config import PrefillConfig
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.formats.model_cache import resolve_model
from edgeh2o.llm import LLM
from edgeh2o.models import drafting
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.sampling_config import SamplingParams

from .reporting import print_progress, run_script

N_READ = (2, 4)
MOST_ID = 1000  # of the tokens, which are random


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.own_draft", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-d", "--depth", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("-r", "--rounds", type=int, default=15)
    parser.add_argument("-t", "--threads", type=int, default=2)
    return parser


def measure_steps(path: str, depth: int, n_rounds: int, threads: int) -> list[list[str]]:
    """Rows of a table: what is computed, milliseconds, calls of the model."""
    heads = []
    for n_guessed in (drafting.GUESSED_TOKENS, 2**30):
        with (
            mock.patch.object(drafting, "GUESSED_TOKENS", n_guessed),
            NativeModelFile(resolve_model(path)) as file,
        ):
            heads.append(file.open_drafting_layer())
            if len(heads) == 1:
                model = file.load()
            heads[-1] = model.load_drafting_layer(heads[-1])
    sizes = {
        "max_context": depth + 64 * n_rounds,
        "batch_size": 512,
        "chunk_size": 512,
        "threads": threads,
    }
    dim, rng = model.config.model_dim, np.random.default_rng(0)
    tokens = rng.integers(0, min(MOST_ID, model.config.vocab_size), depth).astype(np.int32)
    rows = rng.standard_normal((512, dim)).astype(np.float32)
    main = _core.Sequence(model._core_model, _core.dense_policy(), **sizes)
    drafts = [_core.Sequence(each._core_model, _core.dense_policy(), **sizes) for each in heads]
    for first in range(0, depth, 512):
        part = tokens[first : first + 512]
        main.prefill(part, is_last=first + 512 >= depth)
        for each in drafts:
            each.prefill(part, is_last=False, hidden=rows[: len(part)])
    calls: dict[str, Callable[[], object]] = {
        "a token of the model": lambda: main.decode(5),
        "a drafted token": lambda: drafts[0].decode(5, rows[:1]),
        "the same, logits of all tokens": lambda: drafts[1].decode(5, rows[:1]),
    }
    for n in N_READ:
        calls[f"{n} tokens that it reads together"] = (
            lambda n=n: drafts[0].decode_batch(  # type: ignore[misc]
                tokens[:n], rows[:n]
            )
        )
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n_rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    one = median(times["a token of the model"])
    return [
        [name, f"{1e3 * median(each):.2f}", f"{median(each) / one:.3f}"]
        for name, each in times.items()
    ]


def measure_prompt(path: str, depth: int, threads: int) -> list[list[str]]:
    """Rows of a table: seconds of the prompt with drafts and without, the best of three."""
    best = {"off": float("inf"), "auto": float("inf")}
    with LLM(
        resolve_model(path),
        draft="mtp",
        attention="dense",
        prefill=PrefillConfig(),
        threads=threads,
    ) as llm:
        n_ids = min(MOST_ID, llm.config.vocab_size)
        tokens = np.random.default_rng(1).integers(0, n_ids, depth).tolist()
        for _ in range(3):
            for name in best:
                stats = llm.generate(tokens, SamplingParams(max_tokens=1, draft_tokens=name)).stats
                assert stats.ttft_s is not None
                best[name] = min(best[name], stats.ttft_s)
    return [
        [
            f"prompt of {depth} tokens, drafts {name}",
            f"{1e3 * seconds:.0f}",
            f"{seconds / best['off']:.3f}",
        ]
        for name, seconds in best.items()
    ]


def main() -> int:
    """Prints two tables; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if min(args.depth, args.rounds) < 1:
        parser.error("-d and -r are at least 1")
    print_progress("measuring calls")
    columns = ["what", "ms", "calls of the model"]
    table = measure_steps(args.model, args.depth, args.rounds, args.threads)
    print(markdown_table(columns, table))
    print_progress("measuring prompts")
    print(
        markdown_table(
            ["what", "ms", "times"], measure_prompt(args.model, args.depth, args.threads)
        )
    )
    return 0


if __name__ == "__main__":
    run_script(main)
