"""Times one prefill or one decode of edgeh2o, as llama-bench does: no tokenisation, no sampling.

Prints one JSON object. ``bench.prefill`` runs it as a process of its own for every sample.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.session import plan_shape
from edgeh2o.runners.base import Runner
from edgeh2o.tokenizer import Tokenizer

from .own_model import load_model
from .reporting import existing_file, run_script


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.own_timing", description=__doc__)
    parser.add_argument("model", type=existing_file, metavar="MODEL", help="GGUF file")
    parser.add_argument("--attention", choices=("sparse", "dense"), default="sparse")
    parser.add_argument("--isa", help="instruction set (default: the best of this machine)")
    parser.add_argument("--text", type=existing_file, required=True, help="repeated if too short")
    parser.add_argument("-p", type=int, default=0, help="tokens to prefill")
    parser.add_argument("-n", type=int, default=0, help="tokens to decode, if -p is 0")
    parser.add_argument("-d", type=int, default=0, help="tokens in the cache before decoding")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-b", "--batch-size", type=int, default=4096)
    parser.add_argument("-ub", "--chunk-size", type=int, default=1024)
    parser.add_argument("--no-warmup", action="store_true")
    return parser


def main() -> int:
    """Measures once and prints the result; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if (args.p > 0) == (args.n > 0):
        parser.error("give either -p or -n")
    model = load_model(args.model, threads=args.threads, isa_name=args.isa)
    n_cached = args.p or max(1, args.d)
    tokens = _read_tokens(args.text, model.tokenizer, n_cached + args.n)
    attention: SparseAttentionConfig = DenseConfig()
    if args.attention == "sparse":
        attention = H2OConfig().clamped(args.chunk_size)
    shape = plan_shape(
        n_cached + args.n,
        PrefillConfig(batch_size=args.batch_size, chunk_size=args.chunk_size),
        RuntimeConfig(),
    )
    runner = model.start_session(attention, shape)
    if args.p:
        if not args.no_warmup:
            _prefill(runner, tokens)
            runner.reset()
        seconds = _prefill(runner, tokens)
    else:
        seconds = _decode(runner, tokens, n_cached, warm_up=not args.no_warmup)
    tokens_per_s = (args.p or args.n) / seconds
    print(json.dumps({"seconds": seconds, "tokens_per_s": tokens_per_s}))
    return 0


def _read_tokens(text: Path, tokenizer: Tokenizer, n_tokens: int) -> NDArray[np.int32]:
    """The first ``n_tokens`` tokens of the text, which is repeated when it is too short."""
    ids = np.array(tokenizer.encode(text.read_bytes().decode()), np.int32)
    return np.resize(ids, n_tokens)


def _prefill(runner: Runner, tokens: NDArray[np.int32]) -> float:
    """Seconds until the logits after the last token are there."""
    started_at = time.perf_counter()
    for start in range(0, len(tokens), runner.batch_size):
        batch = tokens[start : start + runner.batch_size]
        runner.prefill(batch, is_last=start + len(batch) == len(tokens))
    return time.perf_counter() - started_at


def _decode(runner: Runner, tokens: NDArray[np.int32], n_cached: int, *, warm_up: bool) -> float:
    """Seconds to decode the tokens after the first ``n_cached``; the warm-up is one of them."""
    _prefill(runner, tokens[:n_cached])
    if warm_up:
        runner.decode(int(tokens[n_cached]))
        runner.reset()
        _prefill(runner, tokens[:n_cached])
    started_at = time.perf_counter()
    for token in tokens[n_cached:].tolist():
        runner.decode(token)
    return time.perf_counter() - started_at


if __name__ == "__main__":
    run_script(main)
