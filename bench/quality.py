"""What sparse prefill costs in quality, on the user's own model and text.

    python -m bench.quality model.gguf --text wiki.txt --ctx 4096 --windows 4

Reads the same windows dense and sparse and compares the predictions of every token after the first
chunk, before which both are the same. A standard error is that of the mean over tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o import DenseConfig, H2OConfig
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.session import plan_shape
from edgeh2o.engine.threads import default_thread_count
from edgeh2o.runners.native import NativeModel, NativeRunner

from .log_probabilities import log_softmax
from .own_model import load_model
from .reporting import markdown_table, run_script, write_report


@dataclass(frozen=True, slots=True)
class TokenResults:
    """Per predicted token after the first chunk: float64 arrays [n]."""

    dense_nll: NDArray[np.float64]
    sparse_nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    agrees: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all windows; errors are standard errors of the mean."""

    model: str
    attention: str
    context: int
    windows: int
    dense_perplexity: float
    sparse_perplexity: float
    loss_percent: float
    loss_percent_error: float
    kl: float
    kl_error: float
    top1_agreement: float
    pairs_ratio: float


def start(
    model: NativeModel, attention: SparseAttentionConfig, args: argparse.Namespace
) -> NativeRunner:
    # One chunk per call: logits of a whole window would not fit in memory.
    prefill = PrefillConfig(batch_size=args.chunk, chunk_size=args.chunk)
    return model.start_session(attention, plan_shape(args.ctx, prefill, RuntimeConfig()))


def compare_window(
    tokens: NDArray[np.int32], dense: NativeRunner, sparse: NativeRunner, chunk: int
) -> TokenResults:
    """Prefills one window with both and compares the predictions after the first chunk."""
    parts: list[TokenResults] = []
    dense.reset()
    sparse.reset()
    for first in range(0, len(tokens), chunk):
        piece = tokens[first : first + chunk]
        is_last = first + chunk >= len(tokens)
        rows = []
        for runner in (dense, sparse):
            runner.prefill(piece, is_last=is_last)
            rows.append(log_softmax(runner.row_logits(0, len(piece))))
        if first == 0:
            continue
        targets = tokens[first + 1 : first + chunk + 1]
        dense_rows, sparse_rows = (row[: len(targets)] for row in rows)
        index = np.arange(len(targets))
        kl = np.sum(np.exp(dense_rows) * (dense_rows - sparse_rows), axis=1, dtype=np.float64)
        parts.append(
            TokenResults(
                -dense_rows[index, targets].astype(np.float64),
                -sparse_rows[index, targets].astype(np.float64),
                kl,
                (dense_rows.argmax(1) == sparse_rows.argmax(1)).astype(np.float64),
            )
        )
    return join(parts)


def join(parts: list[TokenResults]) -> TokenResults:
    return TokenResults(
        np.concatenate([part.dense_nll for part in parts]),
        np.concatenate([part.sparse_nll for part in parts]),
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.agrees for part in parts]),
    )


def standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def summarise(
    results: TokenResults,
    model: str,
    attention: str,
    context: int,
    windows: int,
    pairs_ratio: float,
) -> Quality:
    difference = results.sparse_nll - results.dense_nll
    return Quality(
        model=model,
        attention=attention,
        context=context,
        windows=windows,
        dense_perplexity=float(np.exp(results.dense_nll.mean())),
        sparse_perplexity=float(np.exp(results.sparse_nll.mean())),
        loss_percent=100 * float(np.expm1(difference.mean())),
        loss_percent_error=100 * standard_error(difference),
        kl=float(results.kl.mean()),
        kl_error=standard_error(results.kl),
        top1_agreement=100 * float(results.agrees.mean()),
        pairs_ratio=pairs_ratio,
    )


def measure(path: Path, args: argparse.Namespace) -> Quality:
    model = load_model(path, threads=args.threads, isa_name=None)
    tokens = np.array(model.tokenizer.encode(args.text.read_text(encoding="utf-8")), np.int32)
    n_windows = min(args.windows, len(tokens) // args.ctx)
    if n_windows == 0:
        raise SystemExit(
            f"{args.text} has {len(tokens)} tokens, fewer than one window of {args.ctx}"
        )
    attention = H2OConfig(local=args.h2o_local, heavy=args.h2o_heavy).clamped(args.chunk)
    dense, sparse = start(model, DenseConfig(), args), start(model, attention, args)
    windows = [
        compare_window(tokens[i * args.ctx : (i + 1) * args.ctx], dense, sparse, args.chunk)
        for i in range(n_windows)
    ]
    name = f"h2o S={args.chunk} L={args.h2o_local} H={args.h2o_heavy}"
    ratio = sparse.pairs_computed / sparse.pairs_dense
    return summarise(join(windows), path.name, name, args.ctx, n_windows, ratio)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to predict")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--h2o-local", type=int, default=256)
    parser.add_argument("--h2o-heavy", type=int, default=256)
    parser.add_argument("-t", "--threads", type=int, default=default_thread_count())
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    results = [measure(path, args) for path in args.models]
    header = [
        "model",
        "attention",
        "tokens",
        "pairs",
        "perplexity dense",
        "sparse",
        "loss",
        "KL",
        "top-1 agrees",
    ]
    rows = [
        [
            r.model,
            r.attention,
            f"{r.windows} x {r.context}",
            f"{100 * r.pairs_ratio:.0f} %",
            f"{r.dense_perplexity:.3f}",
            f"{r.sparse_perplexity:.3f}",
            f"{r.loss_percent:+.2f} +- {r.loss_percent_error:.2f} %",
            f"{r.kl:.4f} +- {r.kl_error:.4f}",
            f"{r.top1_agreement:.1f} %",
        ]
        for r in results
    ]
    write_report(args.output, [markdown_table(header, rows)], [asdict(r) for r in results])
    return 0


if __name__ == "__main__":
    run_script(main)
