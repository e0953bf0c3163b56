"""Runs the compiled attention on the arrays of the NumPy oracles, which are head-major."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core
from tests.reference.softmax_state import Array

Qkv = tuple[Array, Array, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of a layer; `group` query heads share a KV head. `value_dim` None is `head_dim`."""

    n_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    value_dim: int | None = None

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.group

    @property
    def heads(self) -> dict[str, int]:
        """As keywords of the oracles."""
        return {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            **({"value_dim": self.value_dim} if self.value_dim else {}),
        }


def token_major(array: Array) -> NDArray[np.float32]:
    """[heads, n, d] -> [n, heads, d] in float32."""
    return np.ascontiguousarray(array.transpose(1, 0, 2), dtype=np.float32)


def head_major(array: NDArray[np.float32]) -> Array:
    """[n, heads, d] -> [heads, n, d] in float64."""
    return array.transpose(1, 0, 2).astype(np.float64)


def make_attention(
    policy: _core.SparsePolicy,
    shape: Shape,
    *,
    chunk_size: int,
    max_context: int,
    batch_size: int | None = None,
    cache_type: str = "f32",
    scale: float | None = None,
    soft_cap: float = 0.0,
    precision: str = "f32",
    is_causal: bool = True,
    max_alibi_bias: float = 0.0,
) -> _core.ChunkedAttention:
    return _core.ChunkedAttention(
        policy,
        shape.n_heads,
        shape.n_kv_heads,
        shape.head_dim,
        value_dim=shape.value_dim,
        chunk_size=chunk_size,
        batch_size=batch_size or max_context,
        max_context=max_context,
        cache_type=cache_type,
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
        is_causal=is_causal,
        max_alibi_bias=max_alibi_bias,
    )


def prefill(
    attention: _core.ChunkedAttention,
    qkv: Qkv,
    *,
    ends: tuple[int, ...] | None = None,
    first: int = 0,
    is_last: bool = True,
    stays_open: bool = False,
    window: int = 0,
) -> Array:
    """Output [n_heads, n, d] of tokens [first, ends[-1]), one call per end; default: one call."""
    ends = ends or (qkv[0].shape[1],)
    outputs = []
    for start, end in pairwise((first, *ends)):
        q, k, v = (token_major(array[:, start:end]) for array in qkv)
        last = is_last and end == ends[-1]
        outputs.append(
            attention.run(0, q, k, v, window=window, is_last=last, stays_open=stays_open)
        )
    return head_major(np.concatenate(outputs))


def decode(attention: _core.ChunkedAttention, qkv: Qkv, position: int, *, window: int = 0) -> Array:
    """Output [n_heads, 1, d] of the token at `position`, which is appended."""
    q, k, v = (token_major(array[:, position : position + 1]) for array in qkv)
    return head_major(attention.decode(0, q, k, v, window=window))
