"""Attention that is not causal, whole and in windows to both sides, against the float64 oracle."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Array, Qkv, Shape, make_attention, prefill, token_major
from tests.reference.dense import alibi_slopes, causal_attention
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# How far outputs of narrower products may be off: test_attention_precision.py has the reasons.
LARGEST = {"f32": 1e-5, "bf16": 0.05, "f16": 0.02, "int8": 0.08, "int16": 0.01}

pytestmark = pytest.mark.usefixtures("isa")


def make(shape: Shape, max_context: int, **options: object) -> _core.ChunkedAttention:
    """Chunks are as small as can be: they do not count."""
    return make_attention(
        _core.dense_policy(),
        shape,
        chunk_size=1,
        max_context=max_context,
        is_causal=False,
        **options,  # type: ignore[arg-type]
    )


def pairs_seen(n_tokens: int, window: int | None) -> int:
    positions = np.arange(n_tokens)
    distance = np.abs(positions[:, None] - positions)
    return int((distance < (window or n_tokens)).sum())


@cache  # what takes the time, and is the same for every ISA
def oracle(shape: Shape, n_tokens: int, window: int | None) -> tuple[Qkv, Array]:
    qkv = random_qkv(11, n_tokens=n_tokens, **shape.heads)
    return qkv, causal_attention(*qkv, window=window, is_causal=False)


@pytest.mark.parametrize("window", [None, 1, 2, 9, 40, 299, 300, 1000])
@pytest.mark.parametrize("n_tokens", [1, 2, 33, 300])
def test_every_query_sees_both_sides(n_tokens: int, window: int | None) -> None:
    shape = Shape(group=3)
    qkv, expected = oracle(shape, n_tokens, window)
    attention = make(shape, 320)
    np.testing.assert_allclose(prefill(attention, qkv, window=window or 0), expected, **CLOSE)
    pairs = pairs_seen(n_tokens, window)
    assert attention.pairs_computed == attention.pairs_dense == pairs
    attention.reset()
    again = prefill(attention, qkv, window=window or 0)
    np.testing.assert_allclose(again, expected, **CLOSE)


@pytest.mark.parametrize("window", [None, 1, 100, 1024, 1500])
def test_texts_of_several_pieces(window: int | None) -> None:
    """Keys come in pieces of 1,024: no row may begin with a piece that it sees nothing of."""
    shape = Shape(n_kv_heads=1, group=2, head_dim=32)
    qkv, expected = oracle(shape, 2600, window)
    attention = make(shape, 2600)
    np.testing.assert_allclose(prefill(attention, qkv, window=window or 0), expected, **CLOSE)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_every_precision_and_cache(cache_type: str) -> None:
    shape = Shape()
    for window in (None, 30):
        qkv, expected = oracle(shape, 200, window)
        for precision in _core.attention_precisions():
            attention = make(shape, 200, precision=precision, cache_type=cache_type)
            found = prefill(attention, qkv, window=window or 0)
            allowed = LARGEST[precision] + {"f32": 0.0, "f16": 5e-3, "q8_0": 0.05}[cache_type]
            assert np.abs(found - expected).max() < allowed


def test_threads_change_nothing() -> None:
    shape = Shape(n_kv_heads=3, group=1)
    qkv, _ = oracle(shape, 500, None)
    for window in (0, 70):
        found = []
        for threads in (1, 2, 3):
            attention = _core.ChunkedAttention(
                _core.dense_policy(),
                *(shape.n_heads, shape.n_kv_heads, shape.head_dim),
                **{"chunk_size": 64, "batch_size": 500, "max_context": 500},
                threads=threads,
                is_causal=False,
            )
            found.append(prefill(attention, qkv, window=window))
        np.testing.assert_array_equal(found[1], found[0])
        np.testing.assert_array_equal(found[2], found[0])


def test_soft_caps_and_sinks() -> None:
    shape = Shape()
    q, k, v = random_qkv(5, n_tokens=150, peak=6.0, **shape.heads)
    sinks = np.linspace(-1.0, 3.0, shape.n_heads)
    attention = make(shape, 150, soft_cap=2.0)
    rows = (token_major(array) for array in (q, k, v))
    found = attention.run(0, *rows, window=21, is_last=True, sinks=sinks.astype(np.float32))
    expected = causal_attention(q, k, v, window=21, soft_cap=2.0, sinks=sinks, is_causal=False)
    np.testing.assert_allclose(found.transpose(1, 0, 2), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("n_kv_heads", [1, 3, 12])
def test_biases_by_distance(n_kv_heads: int) -> None:
    """Of heads whose number is no power of two, each by itself and in groups."""
    shape = Shape(n_kv_heads=n_kv_heads, group=12 // n_kv_heads, head_dim=32)
    q, k, v = random_qkv(8, n_tokens=150, **shape.heads)
    for window in (None, 40):
        expected = causal_attention(
            q, k, v, window=window, is_causal=False, slopes=alibi_slopes(12)
        )
        attention = make(shape, 150, max_alibi_bias=8.0)
        found = prefill(attention, (q, k, v), window=window or 0)
        np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("n_tokens", [200, 1100])
def test_biases_by_distance_in_every_precision(n_tokens: int) -> None:
    """And over two pieces of keys, by steep slopes and by gentle ones."""
    shape = Shape(n_kv_heads=3, group=1, head_dim=32)
    qkv = random_qkv(9, n_tokens=n_tokens, **shape.heads)
    for slope in (8.0, 2.0) if n_tokens == 200 else (8.0,):
        expected = causal_attention(*qkv, is_causal=False, slopes=alibi_slopes(3, slope))
        for precision in _core.attention_precisions() if n_tokens == 200 else ("f32",):
            attention = make(shape, n_tokens, precision=precision, max_alibi_bias=slope)
            error = np.abs(prefill(attention, qkv) - expected)
            assert error.max() < LARGEST[precision]
    assert np.abs(causal_attention(*qkv, is_causal=False) - expected).mean() > 0.05


def test_a_bias_by_distance_is_positive() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_alibi_bias = .* must be positive"):
            make(Shape(), 8, max_alibi_bias=wrong)


def test_layers_share_the_place_of_their_rows() -> None:
    """What a layer has cached no later call reads: one layer's rows are all that memory holds."""
    shape, sizes = Shape(), {"chunk_size": 8, "batch_size": 96, "max_context": 96}
    one, many = (
        _core.ChunkedAttention.estimate_bytes(
            _core.dense_policy(),
            *(shape.n_heads, shape.n_kv_heads, shape.head_dim),
            **sizes,
            n_layers=n,
            is_causal=False,
        )["kv_cache"]
        for n in (1, 12)
    )
    assert one == many > 0
    attention = _core.ChunkedAttention(
        _core.dense_policy(),
        *(shape.n_heads, shape.n_kv_heads, shape.head_dim),
        **sizes,
        n_layers=3,
        cache_type="f32",
        is_causal=False,
    )
    for layer in range(3):
        qkv = random_qkv(layer, n_tokens=96, **shape.heads)
        rows = (token_major(array) for array in qkv)
        found = attention.run(layer, *rows, is_last=True)
        expected = causal_attention(*qkv, is_causal=False)
        np.testing.assert_allclose(found.transpose(1, 0, 2), expected, **CLOSE)


def test_a_text_is_one_call() -> None:
    shape = Shape()
    qkv, _ = oracle(shape, 33, None)
    attention = make(shape, 64)
    with pytest.raises(ValueError, match="in one call, not from position 20 on"):
        prefill(attention, qkv, ends=(20, 33))


@pytest.mark.parametrize("case", [case for case in POLICIES if case is not DENSE], ids=str)
def test_rules_are_refused(case: PolicyCase) -> None:
    with pytest.raises(ValueError, match="not causal reads everything, not by a rule"):
        make_attention(case.make_policy(), Shape(), chunk_size=48, max_context=200, is_causal=False)
