"""AltUp: several residual streams per token, of which layers compute one (Baykal et al. 2023).

Streams are [n_streams, n, dim]. What a layer's router says of a token are its modes [n, n_streams],
which factors of the layer's matrices are products with.
"""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array

SMALLEST_SQUARE = 1e-5


def of_size(rows: Array, like: Array) -> Array:
    """The rows with the root mean square of those of ``like``."""
    square, wanted = (np.mean(x * x, axis=-1, keepdims=True) for x in (rows, like))
    return rows * np.sqrt(wanted / np.maximum(square, SMALLEST_SQUARE))


def spread(embedded: Array, matrices: Array) -> Array:
    """The embedding, and its products with matrices [n_streams - 1, dim, dim] in its size."""
    others = [of_size(embedded @ matrix.T, embedded) for matrix in matrices]
    return np.stack([embedded, *others])


def merge(streams: Array, matrices: Array) -> Array:
    """The mean of the first stream and of products of the others in its size."""
    pairs = zip(streams[1:], matrices, strict=True)
    others = [of_size(stream @ matrix.T, streams[0]) for stream, matrix in pairs]
    return np.mean([streams[0], *others], axis=0)


def predict(streams: Array, modes: Array, weights: Array) -> Array:
    """Each stream plus a mixture of all; weights are [n_streams**2, n_streams]."""
    n_streams = len(streams)
    mixture = (modes @ weights.T).reshape(-1, n_streams, n_streams)
    return streams + np.einsum("nkj,jnd->knd", mixture, streams)


def correct(predicted: Array, computed: Array, modes: Array, weights: Array) -> Array:
    """Each stream plus a share of what was wrong in the first; weights [n_streams, n_streams]."""
    shares = 1.0 + modes @ weights.T
    return predicted + shares.T[:, :, None] * (computed - predicted[0])


def cut_off(gate: Array, n_stds: float) -> Array:
    """What lies so many standard deviations (of a sample) above the mean of a row."""
    mean, std = gate.mean(axis=-1, keepdims=True), gate.std(axis=-1, ddof=1, keepdims=True)
    return np.maximum(gate - (mean + n_stds * std), 0.0)
