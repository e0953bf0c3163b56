"""What Gemma 3n and 4 have beside attention and networks: streams, LAuReL, inputs per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.softmax_state import Array

from .rows import Rows
from .streams import spread

Tokens = Sequence[int] | NDArray[np.integer]


def first_streams(rows: Rows, embedded: Array) -> Array:
    return spread(embedded, rows.weights["altup_proj.weight"].astype(np.float64))


def stream_modes(rows: Rows, prefix: str, what: str, x: Array) -> tuple[Array, Array]:
    """Of a layer, by the first stream; and the matrix of the factors that they make."""
    normed = rows.norm(f"{prefix}altup_router_norm", x)
    modes = np.tanh(rows.linear(f"{prefix}altup_router", normed) / x.shape[1])
    return modes, rows.weights[f"{prefix}altup_{what}_coef.weight"].astype(np.float64)


def laurel(rows: Rows, prefix: str, x: Array) -> Array:
    """The normed input and what two matrices of low rank make of it (Menghani et al. 2024)."""
    normed = rows.norm(f"{prefix}attn_norm", x)
    low = rows.linear(f"{prefix}laurel_r", rows.linear(f"{prefix}laurel_l", normed))
    return normed + rows.norm(f"{prefix}laurel_post_norm", low)


def token_inputs(rows: Rows, layer: int, tokens: Tokens, embedded: Array) -> Array:
    """The layer's own input of every token [n, width]."""
    weights = rows.weights
    width = len(weights["per_layer_proj_norm.weight"])
    own = slice(layer * width, (layer + 1) * width)
    table = weights["per_layer_token_embd.weight"][np.asarray(tokens), own].astype(np.float64)
    projected = rows.linear("per_layer_model_proj", embedded / embedded.shape[1] ** 0.5)[:, own]
    return (table * width**0.5 + rows.norm("per_layer_proj_norm", projected)) / 2**0.5
