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
from edgeh2o.engine.embedding import EUCLIDEAN, normalise


def embed_windows(
    llm: LLM, windows: Sequence[NDArray[np.int32]]
) -> tuple[dict[str, NDArray[np.float32]], float]:
    """Vectors [n, dim] of Euclidean length 1 by pooling, and the seconds that a window took."""
    begun_at = time.perf_counter()
    rows = [llm.embed(window, "none", normalize=False) for window in windows]
    seconds = (time.perf_counter() - begun_at) / len(windows)
    pooled = {"last": [each[-1] for each in rows], "mean": [each.mean(axis=0) for each in rows]}
    return {name: normalise(np.stack(each), EUCLIDEAN) for name, each in pooled.items()}, seconds


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
            found, sparse_s = embed_windows(sparse, list(windows))
            exact, dense_s = embed_windows(dense, list(windows))
            for pooling, vectors in exact.items():
                cosines = (found[pooling] * vectors).sum(axis=1)
                others = (vectors @ vectors.T)[~np.eye(n_windows, dtype=bool)]
                print(
                    f"| {length:,} | {pooling} | {cosines.min():.4f} | {cosines.mean():.4f} "
                    f"| {others.mean():.4f} | {sparse_s:.1f} | {dense_s:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
