"""What a generated token reads of a prompt that is kept in pages, in float64.

The first N positions make N // (32 S) blocks of 32 pages of S positions; what follows them is read
always. u_p and l_p are the elementwise maxima and minima of a page's keys, rounded as q8_0 rounds
the 32 values that the pages of a block have of one channel.
"""

from __future__ import annotations

import numpy as np

from tests.reference.cached_rows import stored
from tests.reference.heavy_hitters import Positions
from tests.reference.softmax_state import Array

BLOCK_PAGES = 32


def page_bounds(k: Array, page_size: int) -> tuple[Array, Array]:
    """Maxima and minima [n_pages, d] of the pages of the rows k [n, d] that fill whole blocks."""
    n_pages = len(k) // (BLOCK_PAGES * page_size) * BLOCK_PAGES
    pages = k[: n_pages * page_size].reshape(n_pages, page_size, k.shape[1])

    def rounded(values: Array) -> Array:
        by_channel = values.reshape(n_pages // BLOCK_PAGES, BLOCK_PAGES, k.shape[1]).swapaxes(1, 2)
        return stored(by_channel, "q8_0").swapaxes(1, 2).reshape(values.shape)

    return rounded(pages.max(axis=1)), rounded(pages.min(axis=1))


def largest_bounds(q: Array, k: Array, page_size: int) -> Array:
    """[n_pages] the bound of the logits of q [group, d], unscaled, maximum over the group."""
    upper, lower = page_bounds(k, page_size)
    return (np.maximum(q, 0) @ upper.T + np.minimum(q, 0) @ lower.T).max(axis=0)


def best_pages(scores: Array, n_kept: int) -> Positions:
    """Ascending, those with the highest scores, the first one always; ties go to the lower page."""
    scores = scores.copy()
    scores[0] = np.inf
    return np.sort(np.lexsort((np.arange(len(scores)), -scores))[:n_kept])


def read_pages(q: Array, k: Array, n_prompt: int, *, page_size: int, n_kept: int) -> Positions:
    """The positions that q [group, d] reads of the rows k [n, d], its own last.

    All of them where the prompt has fewer than 2 n_kept pages.
    """
    scores = largest_bounds(q, k[:n_prompt], page_size)
    if len(scores) < 2 * n_kept:
        return np.arange(len(k))
    pages = best_pages(scores, n_kept)
    chosen = (pages[:, None] * page_size + np.arange(page_size)).ravel()
    return np.concatenate([chosen, np.arange(len(scores) * page_size, len(k))])
