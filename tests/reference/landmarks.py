"""Rows that stand for what a memory set leaves out, as tests/reference/headwise.py defines them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.heavy_hitters import Positions
from tests.reference.softmax_state import Array

# Landmarks that a past of any length may have.
MIN_LANDMARKS = 32
# What is added to the logits of landmarks, at most, and of which queries that depends.
MAX_SPREAD, QUERY_STEP = 3.0, 16


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Rows that stand for positions left out: keys, values [n_rows, d], counts [n_rows]."""

    keys: Array
    values: Array
    counts: Array


def landmark_page_sizes(n_pages: int, most: int) -> list[int]:
    """Sizes, in first pages, of the pages that `n_pages` of them have become, oldest first."""
    sizes: list[int] = []
    for _ in range(n_pages):
        if len(sizes) == most:
            first = min(
                (i for i in range(len(sizes) - 1) if sizes[i] == sizes[i + 1]),
                key=lambda i: (sizes[i], i),
            )
            sizes[first : first + 2] = [2 * sizes[first]]
        sizes.append(1)
    return sizes


def make_landmarks(
    k: Array, v: Array, memory: Positions, start: int, *, page_size: int, n_fine: int = 0
) -> Landmarks:
    """Landmarks of a chunk at `start` over the rows k, v [n, d] of one KV head.

    page_size 0: none. Pages grow once there are more than `n_fine` positions; 0: never.
    """
    left_out = np.setdiff1d(np.arange(start), memory)
    n_pages = start // page_size if page_size else 0
    most = max(n_fine // page_size, MIN_LANDMARKS) if page_size and n_fine else n_pages
    ends = page_size * np.cumsum(landmark_page_sizes(n_pages, most), dtype=int)
    page_of = np.searchsorted(ends, left_out, side="right")
    members = [left_out[page_of == page] for page in range(len(ends))]
    members = [positions for positions in members if len(positions)]
    return Landmarks(
        keys=np.array([k[positions].mean(axis=0) for positions in members]).reshape(-1, k.shape[1]),
        values=np.array([v[positions].mean(axis=0) for positions in members]).reshape(
            -1, v.shape[1]
        ),
        counts=np.array([len(positions) for positions in members], dtype=np.float64),
    )


def landmark_spread(
    q: Array, k: Array, start: int, *, page_size: int, scale: float, spread: float
) -> float:
    """What landmarks of rows k [n, d] count more than equal keys, for queries q [group, n, d]."""
    n_pages = start // page_size if page_size else 0
    if n_pages == 0:
        return 0.0
    pages = k[: n_pages * page_size].reshape(n_pages, page_size, -1)
    variances = np.square(pages - pages.mean(axis=1, keepdims=True)).mean(axis=(0, 1))
    squares = np.square(q[:, ::QUERY_STEP]).mean(axis=(0, 1))
    return min(MAX_SPREAD, spread / 2 * scale**2 * float(squares @ variances))
