"""The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025, section 2.1).

A query t of a layer has a few small heads q_th, each with a weight w_th, and every token s one
small key k_s. The score of s is I_ts = sum_h w_th * max(0, q_th . k_s); weights may be negative.
The query's attention reads the top_k tokens with the largest scores among those up to its own, the
same for all heads; its own is not among them unless its score is.
"""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import Array


def index_scores(q: Array, weights: Array, keys: Array) -> Array:
    """Scores [n, n_keys] of keys [n_keys, dim] for q [n, heads, dim] and weights [n, heads]."""
    products = np.maximum(np.einsum("nhd,kd->nhk", q, keys.astype(np.float64)), 0.0)
    return np.asarray(np.einsum("nh,nhk->nk", weights.astype(np.float64), products))


def choose_tokens(scores: Array, top_k: int, position: int) -> np.ndarray:
    """Ascending, the top_k tokens of one query, whose own is at `position`.

    All, where there are no more. Else of equal scores the earlier token's comes first; one that is
    no number is never chosen.
    """
    if position < top_k:
        return np.arange(position + 1, dtype=np.int32)
    visible = scores[: position + 1]
    ranked = [s for s in np.argsort(-visible, kind="stable") if visible[s] > -np.inf]
    return np.sort(np.array(ranked[:top_k] or [position], np.int32))


def margin_of(scores: Array, top_k: int) -> float:
    """How much a token that is chosen scores above those that are not; infinite if all are."""
    if len(scores) <= top_k:
        return np.inf
    ranked = np.sort(scores)
    return float(ranked[-top_k] - ranked[-top_k - 1])


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-6) -> Array:
    """Of every row (Ba et al. 2016)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + eps) * weight + bias)
