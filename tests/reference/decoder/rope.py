"""Rotary position embedding (Su et al. 2021), its frequencies, and the order of rows."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tests.reference.softmax_state import Array

RopeLayout = Literal["interleaved", "half_split"]


def frequencies(rotary_dim: int, base: float) -> Array:
    """Radians per position of the ``rotary_dim / 2`` pairs."""
    return base ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def yarn(inv_freq: Array, base: float, factor: float, original_context: float) -> Array:
    """Frequencies with YaRN (Peng et al. 2023, section 3.2).

    A pair that turns 32 times and more over the original context keeps its frequency, one that
    turns once or less is slowed down by ``factor``, and those between share both.
    """
    rotary_dim = 2 * len(inv_freq)

    def pair_of(turns: float) -> float:
        return rotary_dim * np.log(original_context / (turns * 2 * np.pi)) / (2 * np.log(base))

    fast = max(np.floor(pair_of(32.0)), 0)
    slow = min(np.ceil(pair_of(1.0)), rotary_dim - 1)
    slowed = np.clip((np.arange(len(inv_freq)) - fast) / max(slow - fast, 1e-3), 0.0, 1.0)
    return inv_freq * (slowed / factor + 1.0 - slowed)


def yarn_attention_factor(factor: float, log_multiplier: float) -> float:
    """What YaRN multiplies queries and keys by."""
    return (1.0 + 0.1 * np.log(factor)) / (1.0 + 0.1 * log_multiplier * np.log(factor))


def half_split_row_order(n_heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Row i of the half-split layout is row order[i] of the interleaved one."""
    half = rotary_dim // 2
    pairs = np.arange(half)
    head = np.concatenate([2 * pairs, 2 * pairs + 1, np.arange(rotary_dim, head_dim)])
    return (np.arange(n_heads)[:, None] * head_dim + head).ravel()


def rotate(x: Array, angles: Array, layout: RopeLayout) -> Array:
    """Rotary embedding of x [n_heads, n, d] by angles [n, rotary_dim / 2]."""
    half = angles.shape[1]
    if layout == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    cos, sin = np.cos(angles), np.sin(angles)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out
