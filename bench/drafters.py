"""What a drafted token of a file that drafts for one model costs, in its calls, and a prompt.

    python -m bench.drafters MODEL DRAFTER [-d TOKENS] [-r ROUNDS]

DRAFTER is a GGUF file that was made to draft for MODEL (gemma4-assistant, eagle3, dflash); their
tokenizers are not looked at. Needs no llama.cpp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from edgeh2o import _core
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.formats.model_cache import resolve_model
from edgeh2o.formats.split import open_model_file
from edgeh2o.models.drafters import Drafter, read_drafter
from edgeh2o.runners.base import HiddenRows
from edgeh2o.runners.drafting_layer import DraftingLayerFile
from edgeh2o.runners.native import NativeModel, NativeModelFile
from edgeh2o.runners.runner_calls import keep_hidden

from .reporting import print_progress, run_script

MOST_ID = 1000  # of the tokens, which are random
BATCH = 512
BLOCKS = (4, 8)  # tokens that are guessed at once


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("drafter", metavar="DRAFTER", type=Path)
    parser.add_argument("-d", "--depth", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("-r", "--rounds", type=int, default=15)
    parser.add_argument("-t", "--threads", type=int, default=2)
    return parser


def load(model: Path, drafter: Path) -> tuple[NativeModel, _core.Model, Drafter]:
    """The model, what drafts for it, and what its file says. Raises as opening them does."""
    with NativeModelFile(model) as file, closing(open_model_file(drafter)) as gguf:
        read = read_drafter(gguf, file.config)
        loaded = file.load()
        layers = DraftingLayerFile(gguf, read, name="drafter", flag="--draft")
        return loaded, layers.pack(loaded._core_model), read


def measure(
    model: NativeModel, own: _core.Model, drafter: Drafter, args: argparse.Namespace
) -> list[list[str]]:
    """Rows of a table: what is computed, milliseconds, calls of the model."""
    sizes = {
        "max_context": args.depth + 64 * args.rounds,
        "batch_size": BATCH,
        "chunk_size": BATCH,
        "threads": args.threads,
    }
    n_ids = min(MOST_ID, model.config.vocab_size)
    tokens = np.random.default_rng(0).integers(0, n_ids, args.depth).astype(np.int32)
    main = _core.Sequence(model._core_model, _core.dense_policy(), **sizes)
    keep_hidden(main, HiddenRows(drafter.hidden_layers, is_last_only=drafter.reads_cache))
    draft = None
    if not drafter.reads_cache:
        draft = _core.Sequence(own, _core.dense_policy(), **sizes)
    seconds = {"of the model": 0.0, "of what drafts": 0.0}
    rows = np.zeros((0, own_width(drafter)), np.float32)
    for first in range(0, args.depth, BATCH):
        part = tokens[first : first + BATCH]
        begun_at = time.perf_counter()
        main.prefill(part, is_last=first + BATCH >= args.depth)
        read_at = time.perf_counter()
        if draft is not None:
            assert main.hidden is not None
            rows = draft.encode(main.hidden)
            draft.prefill(part, is_last=False, hidden=rows)
        seconds["of the model"] += read_at - begun_at
        seconds["of what drafts"] += time.perf_counter() - read_at
    calls: dict[str, Callable[[], object]] = {"a token of the model": partial(main.decode, 5)}
    if draft is None:
        assert main.hidden is not None
        reader = _core.LentReader(own, args.threads)
        calls["a drafted token"] = partial(reader.guess, main, 5, main.hidden.copy())
    elif drafter.block_size:
        for n in BLOCKS:
            block = np.array([5, *[drafter.mask_token] * n], np.int32)
            calls[f"{n} drafted tokens, a block"] = partial(draft.decode_batch, block)
    else:
        calls["a drafted token"] = partial(draft.decode, 5, rows[:1])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            begun_at = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun_at)
    one = median(times["a token of the model"])
    table = [[name, median(each), median(each) / one] for name, each in times.items()]
    whole = seconds["of the model"]
    for name, each in seconds.items():
        table.append([f"{args.depth} tokens of a prompt {name}", each, each / whole])
    return [[str(name), f"{1e3 * each:.2f}", f"{share:.3f}"] for name, each, share in table]


def own_width(drafter: Drafter) -> int:
    """Numbers of a row beside a token."""
    return drafter.config.hidden_dim or drafter.config.model_dim


def main() -> int:
    """Prints a table; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if min(args.depth, args.rounds) < 1:
        parser.error("-d and -r are at least 1")
    print_progress("loading")
    loaded = load(resolve_model(args.model), args.drafter)
    print_progress("measuring")
    table = measure(*loaded, args)
    print(markdown_table(["what", "ms", "calls of the model, or times"], table))
    return 0


if __name__ == "__main__":
    run_script(main)
