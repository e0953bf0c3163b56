"""What a key-value cache of each type gives back, in float64."""

from __future__ import annotations

import numpy as np

from tests.reference.quant import Q8_BLOCK
from tests.reference.softmax_state import Array

SMALLEST_HALF, SMALLEST_NORMAL_HALF = 2.0**-24, 2.0**-14
# Of attention in decode to such rows, whose values are of size 1: q8_0 is multiplied as integers,
# its queries and weights rounded to 16 bits (measured: 4.1e-4).
DECODE_ATOL = {"f32": 1e-5, "f16": 1e-5, "q8_0": 8e-4}


def stored(rows: Array, cache_type: str) -> Array:
    """``rows`` [..., head_dim] after a cache of type "f64" (exact), "f32", "f16" or "q8_0".

    q8_0 stores blocks of 32 values, head_dim being a multiple: d = max|x| / 127 in float16, which
    must hold it, and q = round-half-even(x / d) within +-127.
    """
    if cache_type == "q8_0":
        blocks = rows.astype(np.float32).reshape(-1, Q8_BLOCK)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        d = (largest / np.float32(127.0)).astype(np.float16).astype(np.float32)
        inverse = np.divide(np.float32(1.0), d, out=np.zeros_like(d), where=d > 0.0)
        quants = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.float64)
        return (quants * d.astype(np.float64)).reshape(rows.shape)
    dtype = {"f64": np.float64, "f32": np.float32, "f16": np.float16}[cache_type]
    return rows.astype(dtype).astype(np.float64)


def gathered_type(cache_type: str) -> str:
    """How decode keeps rows of a prompt, of a multiple of 32 values, that the cache has as this."""
    return {"f16": "q8_0"}.get(cache_type, cache_type)


def largest_error(rows: Array, cache_type: str) -> Array:
    """Bound [..., head_dim] of |stored(rows) - rows|: half a unit of the last place, half a step.

    With q8_0 the step is max|x| / 127 of the block of 32, rounded to float16; where that is
    denormal, its own error counts 127 times.
    """
    if cache_type == "q8_0":
        blocks = np.abs(rows).reshape(-1, Q8_BLOCK)
        largest = blocks.max(axis=-1, keepdims=True)
        bound = largest / 254.0 * (1.0 + 2.0**-10)
        bound[largest < 127.0 * SMALLEST_NORMAL_HALF] += 127.0 * SMALLEST_HALF / 2
        return np.broadcast_to(bound, blocks.shape).reshape(rows.shape)
    return np.abs(rows) * {"f32": 2.0**-24, "f16": 2.0**-11}[cache_type] + SMALLEST_HALF / 2
