"""Heads whose values differ in size from their keys, against the float64 oracles."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Qkv, Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, stored
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase, h2o_case

S = 64
CLOSE = {"rtol": 0.0, "atol": 2e-5}
N_PROMPT, N_TOKENS = 3 * S + 17, 3 * S + 20
SIZES = [(16, 40), (64, 128), (72, 24), (192, 128), (576, 512)]

pytestmark = pytest.mark.usefixtures("isa")


def make_qkv(shape: Shape, cache_type: str = "f32") -> tuple[Qkv, Qkv]:
    """Rows of N_TOKENS tokens, and the same as a cache gives them back."""
    qkv = random_qkv(20, n_tokens=N_TOKENS, **shape.heads)
    q, k, v = (array.astype(np.float32) for array in qkv)
    return (q, k, v), (q.astype(np.float64), stored(k, cache_type), stored(v, cache_type))


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("case", [case for case in POLICIES if case.decodes_all], ids=str)
def test_prefill_in_calls_and_decode(case: PolicyCase, cache_type: str) -> None:
    shape = Shape(head_dim=32, value_dim=96)
    qkv, cached = make_qkv(shape, cache_type)
    attention = make_attention(
        case.make_policy(), shape, chunk_size=S, max_context=N_TOKENS, cache_type=cache_type
    )
    oracle = case.make_oracle(S)
    output = prefill(attention, qkv, ends=(2 * S, N_PROMPT))
    assert output.shape == (shape.n_heads, N_PROMPT, 96)
    expected = oracle.prefill(*(array[:, :N_PROMPT] for array in cached))
    np.testing.assert_allclose(output, expected, **CLOSE)
    close = {"rtol": 0.0, "atol": 2 * DECODE_ATOL[cache_type]}
    for position in range(N_PROMPT, N_TOKENS):
        expected = oracle.decode(*(array[:, position : position + 1] for array in cached))
        np.testing.assert_allclose(decode(attention, qkv, position), expected, **close)
    if cache_type == "f32":
        np.testing.assert_array_equal(attention.cache.keys(0), cached[1])
        np.testing.assert_array_equal(attention.cache.values(0), cached[2])


@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14), POLICIES[-1]], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), SIZES)
def test_sizes(head_dim: int, value_dim: int, case: PolicyCase) -> None:
    shape = Shape(head_dim=head_dim, value_dim=value_dim)
    qkv, cached = make_qkv(shape)
    options = {"chunk_size": S, "max_context": N_TOKENS}
    attention = make_attention(case.make_policy(), shape, **options)
    oracle = case.make_oracle(S)
    expected = oracle.prefill(*(array[:, :N_PROMPT] for array in cached))
    np.testing.assert_allclose(prefill(attention, qkv, ends=(N_PROMPT,)), expected, **CLOSE)
    expected = oracle.decode(*(array[:, N_PROMPT : N_PROMPT + 1] for array in cached))
    np.testing.assert_allclose(decode(attention, qkv, N_PROMPT), expected, **CLOSE)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize(("head_dim", "value_dim"), SIZES)
def test_windows(head_dim: int, value_dim: int, cache_type: str) -> None:
    shape = Shape(head_dim=head_dim, value_dim=value_dim)
    qkv, cached = make_qkv(shape, cache_type)
    attention = make_attention(
        _core.h2o_policy(8, 8), shape, chunk_size=S, max_context=N_TOKENS, cache_type=cache_type
    )
    expected = causal_attention(*cached, window=S + 9)
    output = prefill(attention, qkv, ends=(S, N_PROMPT), window=S + 9)
    np.testing.assert_allclose(output, expected[:, :N_PROMPT], **CLOSE)
    output = decode(attention, qkv, N_PROMPT, window=S + 9)
    np.testing.assert_allclose(output, expected[:, N_PROMPT : N_PROMPT + 1], **CLOSE)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_a_saved_state_goes_on_bit_for_bit(case: PolicyCase) -> None:
    shape = Shape(head_dim=64, value_dim=24)
    qkv, _ = make_qkv(shape)
    options = {"chunk_size": S, "max_context": N_TOKENS}
    whole, loaded = (make_attention(case.make_policy(), shape, **options) for _ in range(2))
    prefill(whole, qkv, ends=(2 * S,), is_last=False)
    loaded.load_state(whole.save_state())
    for rows, copy in zip(whole.cached_rows(), loaded.cached_rows(), strict=True):
        copy[:] = rows
    outputs = [prefill(each, qkv, first=2 * S, ends=(N_PROMPT,)) for each in (whole, loaded)]
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_the_cache_is_estimated_as_it_is_allocated() -> None:
    sizes, shape = (6, 2, 64), {"chunk_size": S, "batch_size": 128, "max_context": 256}
    options = {**shape, "value_dim": 24, "cache_type": "f32"}
    attention = _core.ChunkedAttention(_core.dense_policy(), *sizes, **options)
    estimate = _core.ChunkedAttention.estimate_bytes(_core.dense_policy(), *sizes, **options)
    assert attention.cache.n_bytes == estimate["kv_cache"] == 256 * 2 * (64 + 24) * 4
