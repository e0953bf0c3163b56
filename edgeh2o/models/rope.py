"""Rotary position embedding as a file describes it: frequencies, and the row order of Q and K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import FormatError

if TYPE_CHECKING:
    import numpy as np

FACTOR_RANGE = (1e-6, 1e9)


def inverse_frequencies(
    rotary_dim: int, base: float, *, linear_factor: float = 1.0, factors: Sequence[float] = ()
) -> tuple[float, ...]:
    """Radians per position of each of the ``rotary_dim / 2`` pairs, in float64.

    ``base ** (-2 i / rotary_dim)``, divided by ``linear_factor`` (position interpolation) and by
    the pair's own entry of ``factors`` (Llama 3's table), if there is one.
    """
    pairs = rotary_dim // 2
    divisors = factors or (1.0,) * pairs
    return tuple(
        base ** (-2.0 * pair / rotary_dim) / (linear_factor * divisors[pair])
        for pair in range(pairs)
    )


def check_factors(name: str, factors: Sequence[float]) -> None:
    """Refuse a table of frequency divisors with an entry that cannot be one (NaN, 0, huge)."""
    low, high = FACTOR_RANGE
    for index, factor in enumerate(factors):
        if not low <= factor <= high:
            raise FormatError(
                f"tensor {name!r}: entry {index} is {factor:g}, but a RoPE factor must be from "
                f"{low:g} to {high:g}; the file is damaged"
            )


def half_split_row_order(n_rows: int, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Source row of each row when interleaved Q or K rows are put into half-split order.

    In a file of the interleaved kind the pair that turns together is rows (2i, 2i + 1) of each
    head; the core turns rows (i, i + rotary_dim / 2). Rows from ``rotary_dim`` on stay in place.
    Returns int32 of shape ``[n_rows]``; ``n_rows`` is a multiple of ``head_dim``.
    """
    import numpy as np

    half = rotary_dim // 2
    head = np.arange(head_dim, dtype=np.int32)
    head[:half] = 2 * np.arange(half, dtype=np.int32)
    head[half:rotary_dim] = 2 * np.arange(half, dtype=np.int32) + 1
    starts = np.arange(0, n_rows, head_dim, dtype=np.int32)
    return (starts[:, None] + head).reshape(-1)
