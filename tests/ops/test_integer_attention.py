"""Prefill attention in integers: every output within the bound that follows from rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.integers import INTEGERS, causal_integer_attention
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array

LN2 = float(np.log(2))  # as a scale: logits in base 2 are products of queries and keys


def _available() -> Iterator[tuple[str, str]]:
    before = _core.active_isa()
    for isa in _core.available_isas():
        _core.use_isa(isa)
        yield from ((isa, name) for name in INTEGERS if name in _core.attention_precisions())
    _core.use_isa(before)


@pytest.fixture(params=list(_available()), ids="-".join)
def precision(request: pytest.FixtureRequest) -> str:
    isa, name = request.param
    _core.use_isa(isa)
    return name


def run(
    qkv: tuple[Array, Array, Array], shape: Shape, precision: str, **options: float | str
) -> Array:
    n_tokens = qkv[0].shape[1]
    return prefill(
        make_attention(
            _core.dense_policy(),
            shape,
            chunk_size=256,
            max_context=n_tokens,
            precision=precision,
            **options,  # type: ignore[arg-type]
        ),
        qkv,
    )


# What outputs are off by where the power of two that weighs a logit gives another level.
OTHER_LEVELS = {"int8": 2e-5, "int16": 6e-5}
# What outputs may be off by in the mean, of those of int8.
FINER = {"int8": 1.0, "int16": 0.05}


@pytest.mark.parametrize("key_mean", [0.0, 30.0])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    ("n_tokens", "head_dim", "value_dim"), [(1, 8, 8), (70, 72, 24), (200, 64, 64)]
)
def test_outputs_stay_within_their_bound(
    precision: str,
    n_tokens: int,
    head_dim: int,
    value_dim: int,
    sharpness: float,
    key_mean: float,
) -> None:
    """From exact attention in float64, for flat and for sharp softmax, and keys far from 0."""
    shape = Shape(n_kv_heads=1, group=2, head_dim=head_dim, value_dim=value_dim)
    q, k, v = random_qkv(3, n_tokens=n_tokens, **shape.heads)
    q *= sharpness / np.sqrt(head_dim)
    k[..., ::5] += key_mean
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    output = run((q, k, v), shape, precision, scale=LN2)
    exact = causal_attention(q, k, v, scale=LN2)
    for head in range(shape.n_heads):
        expected, bound = causal_integer_attention(q[head], k[0], v[0], INTEGERS[precision])
        assert (np.abs(expected - exact[head]) <= bound).all()
        assert (np.abs(output[head] - exact[head]) <= bound).all()
        if key_mean == 0.0:  # what is rounded, and nothing else
            assert np.median(np.abs(output[head] - expected)) < OTHER_LEVELS[precision]


def test_a_mean_of_keys_costs_little(precision: str) -> None:
    """Bytes round keys far from 0, as of heads with a bias, as finely as others."""
    shape = Shape(n_kv_heads=1, group=1)
    q, k, v = random_qkv(4, n_tokens=200, **shape.heads)
    k[..., 7] += 300.0
    error = np.abs(run((q, k, v), shape, precision) - causal_attention(q, k, v))
    assert error.mean() < 6e-3


def test_soft_caps_are_of_the_logits(precision: str) -> None:
    shape = Shape(n_kv_heads=1, group=2)
    q, k, v = random_qkv(5, n_tokens=150, **shape.heads)
    q *= 6
    output = run((q, k, v), shape, precision, soft_cap=4.0)
    error = np.abs(output - causal_attention(q, k, v, soft_cap=4.0))
    assert error.mean() < 0.015 * FINER[precision]
    assert np.abs(output - causal_attention(q, k, v)).mean() > 0.1


def test_weights_far_below_the_maximum_count_by_their_number(precision: str) -> None:
    """A row whose maximum is in another block of keys: 128 small weights are together as large."""
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    q, k, v = np.zeros((1, 193, 8)), np.zeros((1, 193, 8)), np.ones((1, 193, 8))
    q[..., 0], k[0, 0, 0], v[0, :64] = 1.0, np.log2(1000), -1.0
    k[0, 1:64, 0] = -20.0
    output = run((q, k, v), shape, precision, scale=LN2)
    np.testing.assert_allclose(output[0, 192], (129 - 1000) / (129 + 1000), atol=2e-3)
