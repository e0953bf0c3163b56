"""Plain encoders of the GGUF formats with a 4-bit codebook, which the `gguf` package only decodes.

The scale brings the largest weight of a block to the codebook's largest level, without the search
for a better fit that llama-quantize does: good for test models, not for serving.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CODEBOOK_TYPES = ("IQ4_NL", "IQ4_XS")
SUB_BLOCK, SUPER_BLOCK = 32, 256
LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize_codebook(weights: Floats, type_name: str) -> Bytes:
    """Encodes weights [rows, cols] as IQ4_NL (cols a multiple of 32) or IQ4_XS (of 256).

    Returns:
        [rows, bytes per row] blocks.

    Raises:
        ValueError: for another type or a ragged row.
    """
    if type_name not in CODEBOOK_TYPES:
        raise ValueError(f"{type_name} is not one of {', '.join(CODEBOOK_TYPES)}")
    size = SUB_BLOCK if type_name == "IQ4_NL" else SUPER_BLOCK
    if weights.shape[-1] % size:
        raise ValueError(f"{type_name} needs rows of a multiple of {size} values")
    subs = weights.astype(np.float32).reshape(-1, size // SUB_BLOCK, SUB_BLOCK)
    step = np.abs(subs).max(axis=2) / np.float32(113.0)
    if type_name == "IQ4_NL":
        d = step[:, 0].astype(np.float16)
        encoded = np.concatenate([_bytes_of(d), _nearest(subs, d[:, None])], axis=1)
    else:
        d = (step.max(axis=1) / np.float32(31.0)).astype(np.float16)
        divisor = np.where(d > 0, d, 1).astype(np.float32)[:, None]
        scale = np.clip(np.rint(step / divisor), 0, 31).astype(np.uint8)
        stored = scale + np.uint8(32)
        high = np.bitwise_or.reduce(
            (stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1
        )
        low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
        quants = _nearest(subs, d.astype(np.float32)[:, None] * scale)
        encoded = np.concatenate([_bytes_of(d), _bytes_of(high), low, quants], axis=1)
    return encoded.reshape(*weights.shape[:-1], -1)


def _nearest(subs: Floats, step: NDArray[np.floating]) -> Bytes:
    """Indices of the nearest levels of subs [n, k, 32] in units of step [n, k], two to a byte."""
    unit = np.where(step > 0, step, 1).astype(np.float32)
    borders = (LEVELS[1:] + LEVELS[:-1]) / 2
    index = np.searchsorted(borders, subs / unit[..., None]).astype(np.uint8)
    return (index[..., :16] | index[..., 16:] << 4).reshape(len(subs), -1)


def _bytes_of(values: NDArray[np.generic]) -> Bytes:
    return values.view(np.uint8).reshape(len(values), -1)
