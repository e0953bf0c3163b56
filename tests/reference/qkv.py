"""Seeded queries, keys and values for attention tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from tests.reference.softmax_state import Array


class Chunk(Protocol):
    @property
    def margins(self) -> Array: ...


class ChoosingLayer(Protocol):
    """`H2OLayer` or `HeadwiseLayer`."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    def prefill(self, q: Array, k: Array, v: Array) -> Array: ...


@lru_cache(maxsize=8)  # tests of every instruction set ask for the same
def _normal(seed: int, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def random_qkv(
    seed: int,
    *,
    n_heads: int,
    n_kv_heads: int,
    n_tokens: int,
    head_dim: int,
    value_dim: int | None = None,
    peak: float = 2.0,
) -> tuple[Array, Array, Array]:
    """q [n_heads, n, d], k [n_kv_heads, n, d] and v [n_kv_heads, n, value_dim], d if None.

    Logits have standard deviation `peak`.
    """
    q, k, v = _normal(
        seed,
        (n_heads, n_tokens, head_dim),
        (n_kv_heads, n_tokens, head_dim),
        (n_kv_heads, n_tokens, value_dim or head_dim),
    )
    return q * peak**0.5, k * peak**0.5, v.copy()


def separated_qkv(
    seed: int,
    make_layer: Callable[[], ChoosingLayer],
    *,
    n_heads: int,
    n_kv_heads: int,
    n_tokens: int,
    head_dim: int,
    min_margin: float = 1e-3,
) -> tuple[Array, Array, Array]:
    """random_qkv whose every choice of a layer of this kind is decided by at least `min_margin`.

    The values are rounded to float16 first, so a cache of that type holds them exactly.
    Use it where positions are compared with an implementation that rounds scores.

    Raises:
        ValueError: if no seed of 200 from `seed` on qualifies.
    """
    for candidate in range(seed, seed + 200):
        q, k, v = (
            array.astype(np.float16).astype(np.float64)
            for array in random_qkv(
                candidate,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                n_tokens=n_tokens,
                head_dim=head_dim,
            )
        )
        layer = make_layer()
        layer.prefill(q, k, v)
        if min(chunk.margins.min() for chunk in layer.chunks) >= min_margin:
            return q, k, v
    raise ValueError(f"no seed in [{seed}, {seed + 200}) has margins >= {min_margin}")
