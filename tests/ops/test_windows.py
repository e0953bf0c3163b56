"""Sliding windows and soft caps of attention against the float64 oracle."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Array, Qkv, Shape, decode, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase, h2o_case

pytestmark = pytest.mark.usefixtures("isa")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def pairs_in_window(n_tokens: int, window: int) -> int:
    return sum(min(position + 1, window) for position in range(n_tokens))


@pytest.mark.parametrize("chunk_size", [1, 33, 100])
@pytest.mark.parametrize("window", [1, 7, 33, 90, 1000])
def test_every_query_sees_its_window(window: int, chunk_size: int) -> None:
    shape = Shape(group=2)
    qkv = random_qkv(1, n_tokens=300, **shape.heads)
    attention = make_attention(_core.dense_policy(), shape, chunk_size=chunk_size, max_context=302)
    q, k, v = qkv
    expected = causal_attention(q[:, :298], k[:, :298], v[:, :298], window=window)
    output = prefill(attention, qkv, ends=(128, 129, 298), window=window)
    np.testing.assert_allclose(output, expected, **CLOSE)
    assert attention.pairs_computed == pairs_in_window(298, window)
    for position in (298, 299):
        end = position + 1
        expected = causal_attention(q[:, position:end], k[:, :end], v[:, :end], window=window)
        output = decode(attention, qkv, position, window=window)
        np.testing.assert_allclose(output, expected, **CLOSE)


@cache  # what takes the time, and is the same for every ISA
def pieces(shape: Shape, window: int) -> tuple[Qkv, Array]:
    qkv = random_qkv(2, n_tokens=2600, **shape.heads)
    return qkv, causal_attention(*qkv, window=window)


@pytest.mark.parametrize("window", [1, 40, 700, 1024, 1500])
def test_windows_over_several_pieces(window: int) -> None:
    """Keys come in pieces of 1,024: no row may begin with a piece that it sees nothing of."""
    shape = Shape(n_kv_heads=1, group=3, head_dim=32)
    qkv, expected = pieces(shape, window)
    for chunk_size, ends in ((2600, (2600,)), (1000, (1100, 2600))):
        attention = make_attention(
            _core.dense_policy(), shape, chunk_size=chunk_size, max_context=2600
        )
        output = prefill(attention, qkv, ends=ends, window=window)
        np.testing.assert_allclose(output, expected, **CLOSE)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_policies_are_not_asked_in_layers_with_a_window(case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(3, n_tokens=200, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=48, max_context=200)
    output = prefill(attention, qkv, ends=(96, 200), window=60)
    np.testing.assert_allclose(output, causal_attention(*qkv, window=60), **CLOSE)


def test_joint_column_sums_leave_windows_alone() -> None:
    shape = Shape()
    qkv = random_qkv(4, n_tokens=200, **shape.heads)
    policy = _core.headwise_policy([16] * shape.n_kv_heads, local=8)
    attention = make_attention(policy, shape, chunk_size=48, max_context=200)
    output = prefill(attention, qkv, ends=(96, 200), window=60)
    np.testing.assert_allclose(output, causal_attention(*qkv, window=60), **CLOSE)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [None, 21])
def test_soft_caps(soft_cap: float, window: int | None) -> None:
    shape = Shape()
    q, k, v = random_qkv(5, n_tokens=150, peak=6.0, **shape.heads)
    attention = make_attention(
        _core.dense_policy(), shape, chunk_size=40, max_context=150, soft_cap=soft_cap
    )
    expected = causal_attention(q, k, v, window=window, soft_cap=soft_cap)
    # A capped logit is off by some rounding errors of the cap, and weights by the same fraction.
    close = {"rtol": 1e-5, "atol": 1e-5 + 8 * np.finfo(np.float32).eps * soft_cap}
    output = prefill(attention, (q, k, v), ends=(149,), window=window or 0)
    np.testing.assert_allclose(output, expected[:, :149], **close)
    output = decode(attention, (q, k, v), 149, window=window or 0)
    np.testing.assert_allclose(output, expected[:, 149:], **close)


def test_soft_caps_of_scored_attention() -> None:
    shape = Shape()
    qkv = random_qkv(6, n_tokens=150, peak=6.0, **shape.heads)
    case = h2o_case(150, 0)
    attention = make_attention(
        case.make_policy(), shape, chunk_size=40, max_context=150, soft_cap=2.0
    )
    expected = causal_attention(*qkv, soft_cap=2.0)
    np.testing.assert_allclose(prefill(attention, qkv), expected, **CLOSE)
    plain = make_attention(DENSE.make_policy(), shape, chunk_size=40, max_context=150)
    assert np.abs(prefill(plain, qkv) - expected).max() > 0.05


def test_refuses_a_negative_soft_cap() -> None:
    with pytest.raises(ValueError, match="soft_cap = -1"):
        make_attention(_core.dense_policy(), Shape(), chunk_size=8, max_context=8, soft_cap=-1.0)
