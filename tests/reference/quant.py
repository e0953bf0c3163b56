"""8-bit quantisation of activations, as the matmul kernels do it on the fly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Q8_BLOCK = 32


def quantise_q8_rows(x: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantises rows in blocks of 32 columns: d = max|x| / 127, q = round-half-even(x / d).

    Args:
        x: [rows, cols], cols a multiple of 32.

    Returns:
        q [rows, cols] in [-127, 127], and d [rows, cols / 32]; a block of zeros has d = 0.

    Raises:
        ValueError: if cols is not a multiple of 32.
    """
    rows, cols = x.shape
    if cols % Q8_BLOCK:
        raise ValueError(f"{cols} columns are not a multiple of {Q8_BLOCK}")
    blocks = x.astype(np.float32).reshape(rows, cols // Q8_BLOCK, Q8_BLOCK)
    d = np.abs(blocks).max(axis=-1) / np.float32(127.0)
    divisor = np.where(d > 0.0, d, np.float32(1.0))
    q = np.rint(blocks / divisor[..., None])
    return q.astype(np.int8).reshape(rows, cols), d


def dequantise_q8_rows(q: NDArray[np.int8], d: NDArray[np.float32]) -> NDArray[np.float64]:
    """[rows, cols] values that a pair of `quantise_q8_rows` stands for."""
    return q.astype(np.float64) * np.repeat(d.astype(np.float64), Q8_BLOCK, axis=1)
