"""How alike the vectors of texts are that are read sparsely and densely.

    python -m bench.embeddings model.gguf text.txt --lengths 4096 8000 --windows 4

Windows of the text follow each other. Cosines of the two vectors of a window, the least and the
mean, beside the mean cosine of dense vectors of different windows, and seconds of both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o import LLM

POOLINGS = ("last", "mean")


def embed_windows(
    llm: LLM, windows: Sequence[NDArray[np.int32]], pooling: str
) -> tuple[NDArray[np.float32], float]:
    """Vectors [n, dim] of Euclidean length 1, and the seconds that a window took."""
    begun_at = time.perf_counter()
    vectors = [llm.embed(window, pooling) for window in windows]
    return np.stack(vectors), (time.perf_counter() - begun_at) / len(windows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="embeddings", description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8000])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    text = options.text.read_text("utf-8")
    with (
        LLM(options.model, threads=options.threads) as sparse,
        LLM(options.model, threads=options.threads, attention="dense") as dense,
    ):
        tokens = np.array(sparse.tokenize(text), np.int32)
        print("| tokens | pooling | least cosine | mean | of two windows | sparse s | dense s |")
        print("|---|---|---|---|---|---|---|")
        for length in options.lengths:
            n_windows = min(options.windows, len(tokens) // length)
            if n_windows < 2:
                parser.error(f"the text has {len(tokens)} tokens, too few for windows of {length}")
            windows = tokens[: n_windows * length].reshape(n_windows, length)
            for pooling in POOLINGS:
                found, sparse_s = embed_windows(sparse, list(windows), pooling)
                exact, dense_s = embed_windows(dense, list(windows), pooling)
                cosines = (found * exact).sum(axis=1)
                others = (exact @ exact.T)[~np.eye(n_windows, dtype=bool)]
                print(
                    f"| {length:,} | {pooling} | {cosines.min():.4f} | {cosines.mean():.4f} "
                    f"| {others.mean():.4f} | {sparse_s:.1f} | {dense_s:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
