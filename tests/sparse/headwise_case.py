"""The compiled headwise policy beside its oracle: budgets, shapes and what is compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeh2o import _core
from tests.ops.attention_case import Qkv, Shape, make_attention
from tests.reference.headwise import HeadwiseLayer
from tests.reference.qkv import separated_qkv

S = 32
SHAPE = Shape(n_kv_heads=3, group=2, head_dim=16)
OPTIONS: dict[str, Any] = {"local": 6, "sinks": 2, "decay": 0.9, "page_size": 16}
BUDGETS = (9, 60, None)
CLOSE = {"rtol": 0.0, "atol": 2e-5}
# Scores are means of a few weights; float32 weights of 200 keys keep six digits.
MIN_MARGIN = 2e-5


def make_headwise(
    n_tokens: int,
    budgets: tuple[int | None, ...] = BUDGETS,
    *,
    chunk_size: int = S,
    cache_type: str = "f32",
    **options: Any,
) -> tuple[_core.ChunkedAttention, HeadwiseLayer]:
    """The compiled policy in a session of SHAPE, and its oracle."""
    options = {**OPTIONS, **options}
    attention = make_attention(
        _core.headwise_policy(list(budgets), **options),
        SHAPE,
        chunk_size=chunk_size,
        max_context=n_tokens,
        cache_type=cache_type,
    )
    return attention, HeadwiseLayer(chunk_size=chunk_size, budgets=budgets, **options)


def separated(n_tokens: int, budgets: tuple[int | None, ...] = BUDGETS, **options: Any) -> Qkv:
    return separated_qkv(
        0,
        lambda: HeadwiseLayer(chunk_size=S, budgets=budgets, **{**OPTIONS, **options}),
        n_tokens=n_tokens,
        min_margin=MIN_MARGIN,
        **SHAPE.heads,
    )


def check_latest_chunk(policy: _core.SparsePolicy, layer: HeadwiseLayer) -> None:
    chunk = layer.chunks[-1]
    for head in range(SHAPE.n_kv_heads):
        np.testing.assert_array_equal(policy.memory_set(0, head), chunk.memory[head])
        if layer.budgets[head] is not None:
            scores = policy.scores(0, head, chunk.stop)
            np.testing.assert_allclose(scores, chunk.means[head], rtol=2e-5, atol=1e-6)
