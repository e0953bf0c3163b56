"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), in both of its forms.

A head's keys and values are products of the latent part c of one row per token, and its keys have
the row's rotated part r behind: k = [W_k c; r], v = W_v c. Computed so, attention is that of as
many KV heads as query heads. Or W_k goes to the queries and W_v to what comes out, and the rows
themselves are keys and, but for r, values of a single KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference.softmax_state import Array


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The latent part of a row, the rotated part, and what a query has beside it."""

    rank: int
    rope_dim: int
    nope_dim: int


def expanded(rows: Array, w_k: Array, w_v: Array) -> tuple[Array, Array]:
    """Keys [heads, n, nope + rope] and values [heads, n, value] of rows [n, rank + rope].

    w_k [heads, nope, rank], w_v [heads, value, rank].
    """
    rank = w_k.shape[-1]
    latent, rotated = rows[:, :rank], rows[:, rank:]
    keys = np.einsum("hdr,nr->hnd", w_k, latent)
    shared = np.broadcast_to(rotated, (len(w_k), *rotated.shape))
    return np.concatenate([keys, shared], axis=-1), np.einsum("hdr,nr->hnd", w_v, latent)


def absorbed_queries(q: Array, w_k: Array) -> Array:
    """Queries [heads, n, rank + rope] for the rows themselves, of q [heads, n, nope + rope]."""
    nope_dim = w_k.shape[1]
    latent = np.einsum("hdr,hnd->hnr", w_k, q[..., :nope_dim])
    return np.concatenate([latent, q[..., nope_dim:]], axis=-1)


def absorbed_values(attended: Array, w_v: Array) -> Array:
    """Values [heads, n, value] of what attention to the rows gave, [heads, n, rank]."""
    return np.asarray(np.einsum("hdr,hnr->hnd", w_v, attended))
