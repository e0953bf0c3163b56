"""8-bit quantisation of activations, as the matmul kernels do it on the fly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Q8_BLOCK = 32
# Of 256 values that share a scale, 16 neighbours add up to at most this, before they are rounded.
LARGEST_SUM_OF_16 = 1023 - 8


def quantise_q8_rows(
    x: NDArray[np.floating], scale_block: int = Q8_BLOCK
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantises rows in blocks of columns: d = max|x| / 127, q = round-half-even(x / d).

    Args:
        x: [rows, cols], cols a multiple of scale_block.
        scale_block: how many columns share d, 32 or 256; of 256, d is at least what leaves the sum
            of the magnitudes of 16 neighbours at `LARGEST_SUM_OF_16`.

    Returns:
        q [rows, cols] in [-127, 127], and d [rows, cols / 32]; a block of zeros has d = 0.

    Raises:
        ValueError: if cols is not a multiple of scale_block.
    """
    rows, cols = x.shape
    if cols % scale_block:
        raise ValueError(f"{cols} columns are not a multiple of {scale_block}")
    blocks = x.astype(np.float32).reshape(rows, cols // scale_block, scale_block)
    d = np.abs(blocks).max(axis=-1) / np.float32(127.0)
    if scale_block > Q8_BLOCK:
        sums = np.abs(blocks, dtype=np.float32).reshape(rows, -1, scale_block // 16, 16).sum(-1)
        d = np.maximum(d, sums.max(-1) / np.float32(LARGEST_SUM_OF_16))
    divisor = np.where(d > 0.0, d, np.float32(1.0))
    q = np.rint(blocks / divisor[..., None])
    return q.astype(np.int8).reshape(rows, cols), np.repeat(d, scale_block // Q8_BLOCK, axis=1)


def dequantise_q8_rows(q: NDArray[np.int8], d: NDArray[np.float32]) -> NDArray[np.float64]:
    """[rows, cols] values that a pair of `quantise_q8_rows` stands for."""
    return q.astype(np.float64) * np.repeat(d.astype(np.float64), Q8_BLOCK, axis=1)
