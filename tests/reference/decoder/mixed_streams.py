"""Residual streams that are mixed before every branch (hyper-connections), and n-grams.

As Qwen3.8-Flash-Next has them. Streams are [n, n_streams, dim]. What a branch reads is the mean
over them of their norms, each times the sigmoid of a gate that all of them make together by way of
a short vector; every stream gets what the branch gives, times 2 sigmoid of a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.softmax_state import Array

from .feed_forward import sigmoid, silu
from .ngrams import ngram_rows
from .rows import Rows

SMALLEST_PRODUCT = 1e-6


class MixedStreams:
    """Those of one prompt in progress."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._tokens: list[int] = []
        self._history = np.zeros((0, 0))  # of what is convolved, the latest last

    def begin(self, embedded: Array) -> Array:
        """The streams of new tokens."""
        return np.repeat(embedded[:, None], self.rows.config.n_streams, axis=1)

    def mix(self, name: str, streams: Array) -> tuple[Array, Array]:
        """What a branch reads [n, dim], and the shares of what it gives [n, n_streams, 1]."""
        n, n_streams, _ = streams.shape
        normed = self.rows.norm(name + "_norm", streams.reshape(n, -1))
        vectors = silu(self.rows.linear(name + "_down", normed) / n_streams)
        gated = normed * sigmoid(self.rows.linear(name + "_up", vectors))
        mixed = gated.reshape(streams.shape).mean(axis=1)
        if f"{name}_inject.weight" not in self.rows.weights:
            return mixed, np.zeros((n, n_streams, 1))
        shares = self.rows.linear(name + "_inject", normed) / n_streams
        return mixed, 2.0 * sigmoid(shares)[..., None]

    def add_ngrams(self, tokens: Sequence[int], streams: Array) -> Array:
        """The streams of the tokens with what their n-grams add."""
        ngrams = self.rows.config.ngrams
        assert ngrams is not None
        prefix, n, weights = f"blk.{ngrams.layer}.ple_", len(tokens), self.rows.weights
        before = len(self._tokens)
        self._tokens += [int(token) for token in tokens]
        named = [ngram_rows(ngrams, self._tokens[: before + i + 1]) for i in range(n)]
        table = weights["per_layer_token_embd.weight"].astype(np.float64)
        embedded = table[np.array(named)].reshape(n, -1)

        def normed(name: str, values: Array) -> Array:
            return self.rows.norm(f"{prefix}norm_{name}", values.reshape(n, -1)).reshape(
                streams.shape
            )

        keys = normed("key", self.rows.linear(prefix + "key", embedded))
        values = self.rows.linear(prefix + "value", embedded)
        products = np.sum(keys * normed("query", streams), axis=-1) / np.sqrt(values.shape[1])
        sizes = np.sqrt(np.maximum(np.abs(products), SMALLEST_PRODUCT))
        gated = values[:, None] * sigmoid(np.sign(products) * sizes)[..., None]
        taps = weights[prefix + "conv1d.weight"].astype(np.float64)  # [channels, taps]
        inputs = normed("conv", gated).reshape(n, -1)
        n_seen = (taps.shape[1] - 1) * ngrams.n_tokens
        if not self._history.size:
            self._history = np.zeros((n_seen, inputs.shape[1]))
        rows = np.concatenate([self._history, inputs])
        self._history = rows[len(rows) - n_seen :]
        sums = sum(
            taps[:, j] * rows[j * ngrams.n_tokens : j * ngrams.n_tokens + n]
            for j in range(taps.shape[1])
        )
        return streams + gated + silu(np.asarray(sums)).reshape(streams.shape)
