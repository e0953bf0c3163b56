"""Numbers of the rotary embeddings of files that tools write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LLAMA3_FACTOR, LLAMA3_LOW, LLAMA3_HIGH = 8.0, 1.0, 4.0
LINEAR_FACTOR = 4.0
LONGROPE_FACTORS = {"short": (1.0, 1.5), "long": (1.0, 8.0)}  # of the fastest and slowest pair
LONGROPE_ATTENTION_FACTOR = 1.2


def rope_sections(n_pairs: int) -> list[int]:
    """Pairs of time, height and width, interleaved or not, and none of a fourth axis."""
    return [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0]


def llama3_factors(
    *, rope_base: float, n_pairs: int, trained_context: float, factor: float
) -> NDArray[np.float32]:
    """Divisors [n_pairs] of the rotation frequencies as Llama 3.1 defines them: 1 for short
    waves, ``factor`` for waves longer than the trained context, smooth between."""
    frequency = rope_base ** (-np.arange(n_pairs) / n_pairs)
    turns = trained_context * frequency / (2.0 * np.pi)
    smooth = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
