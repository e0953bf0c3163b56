"""Prefill attention of bf16 products: what it rounds, how far that is from f32, and its limits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Qkv, Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array
from tests.sparse.policies import DENSE, POLICIES, PolicyCase, h2o_case

S = 64
# bf16 keeps 8 bits: a value is off by 2^-9 of itself at most, a logit of 64 products of size 1 by
# some 2^-9, and a weight by as much. Values are of size 1, outputs mean over several of them.
LARGEST_ERROR = 0.05
MEAN_ERROR = 4e-3


def _isas_with_bf16() -> Iterator[str]:
    before = _core.active_isa()
    for isa in _core.available_isas():
        _core.use_isa(isa)
        if _core.has_bf16_attention():
            yield isa
    _core.use_isa(before)


@pytest.fixture(params=list(_isas_with_bf16()))
def bf16_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.active_isa()
    _core.use_isa(request.param)
    yield request.param
    _core.use_isa(before)


def to_bf16(x: Array) -> Array:
    """Rounded to nearest even, as values of the type that came in."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(x.dtype)


def run(
    policy: _core.SparsePolicy, shape: Shape, qkv: Qkv, precision: str, **options: object
) -> Array:
    n_tokens = qkv[0].shape[1]
    sizes = {"chunk_size": S, "max_context": n_tokens, **options}
    return prefill(make_attention(policy, shape, precision=precision, **sizes), qkv)  # type: ignore[arg-type]


def rounding_oracle(qkv: Qkv) -> Array:
    """Dense attention of one chunk; logits are in base 2, so that the scale rounds nothing.

    The weights 2^(logit - maximum) are rounded where they meet values, but not in their sum.
    """
    q, k, v = qkv
    group = q.shape[0] // k.shape[0]
    outputs = []
    for head, query in enumerate(q):
        logits = to_bf16(query) @ to_bf16(k[head // group]).T
        logits[~np.tri(*logits.shape, dtype=bool)] = -np.inf
        weights = np.exp2(logits - logits.max(axis=1, keepdims=True))
        outputs.append(
            to_bf16(weights) @ to_bf16(v[head // group]) / weights.sum(axis=1, keepdims=True)
        )
    return np.stack(outputs)


@pytest.mark.parametrize("n_tokens", [1, 2, 33, S - 1, 150])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (1, 8), (4, 72), (7, 80), (2, 128)])
def test_rounds_what_it_multiplies_and_nothing_else(
    bf16_isa: str, group: int, head_dim: int, n_tokens: int
) -> None:
    shape = Shape(group=group, head_dim=head_dim)
    q, k, v = random_qkv(1, n_tokens=n_tokens, **shape.heads)
    q /= np.sqrt(head_dim)
    output = run(
        _core.dense_policy(), shape, (q, k, v), "bf16", chunk_size=256, scale=float(np.log(2))
    )
    error = np.abs(output - rounding_oracle((q, k, v)))
    # A logit that float32 has on the other side of a weight's rounding border moves one weight.
    assert np.quantile(error, 0.98) < 2e-5
    assert error.max() < 4e-3


@pytest.mark.parametrize("n_tokens", [S + 1, 4 * S])
@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_is_near_f32(bf16_isa: str, case: PolicyCase, n_tokens: int) -> None:
    """Rules that count attention choose nearly the same keys, so that most outputs are near."""
    shape = Shape()
    qkv = random_qkv(1, n_tokens=n_tokens, **shape.heads)
    outputs, chosen = [], []
    for precision in ("f32", "bf16"):
        attention = make_attention(
            case.make_policy(), shape, chunk_size=S, max_context=n_tokens, precision=precision
        )
        outputs.append(prefill(attention, qkv))
        chosen.append(
            [(h, p) for h in range(2) for p in attention.policy.memory_set(0, h).tolist()]
        )
    error = np.abs(outputs[1] - outputs[0])
    assert 0 < np.median(error) < MEAN_ERROR
    assert len(set(chosen[0]) & set(chosen[1])) >= 0.8 * len(chosen[0])
    if n_tokens == S + 1:  # nothing was chosen by weights of a memory yet
        assert error[:, :S].mean() < MEAN_ERROR
        assert error[:, :S].max() < LARGEST_ERROR


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("window", [0, 1, 40, 100])
def test_windows_and_cache_types(bf16_isa: str, window: int, cache_type: str) -> None:
    shape = Shape()
    qkv = random_qkv(2, n_tokens=3 * S + 11, **shape.heads)
    outputs = [
        prefill(
            make_attention(
                _core.dense_policy(),
                shape,
                chunk_size=S,
                max_context=3 * S + 11,
                cache_type=cache_type,
                precision=precision,
            ),
            qkv,
            window=window,
        )
        for precision in ("f32", "bf16")
    ]
    error = np.abs(outputs[1] - outputs[0])
    assert 0 < error.mean() < MEAN_ERROR
    assert error.max() < LARGEST_ERROR


@pytest.mark.parametrize("n_tokens", [1100, 2300])
def test_memory_beyond_one_piece(bf16_isa: str, n_tokens: int) -> None:
    shape = Shape(n_kv_heads=2, group=1, head_dim=16)
    qkv = random_qkv(6, n_tokens=n_tokens, **shape.heads)
    error = np.abs(
        run(_core.dense_policy(), shape, qkv, "bf16", chunk_size=256) - causal_attention(*qkv)
    )
    assert error.mean() < MEAN_ERROR
    assert error.max() < LARGEST_ERROR


@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14)], ids=str)
def test_several_calls_equal_one_exactly(bf16_isa: str, case: PolicyCase) -> None:
    shape = Shape()
    n_tokens = 3 * S + 17
    qkv = random_qkv(7, n_tokens=n_tokens, **shape.heads)
    whole, split = (
        make_attention(
            case.make_policy(), shape, chunk_size=S, max_context=n_tokens, precision="bf16"
        )
        for _ in range(2)
    )
    np.testing.assert_array_equal(
        prefill(split, qkv, ends=(S, 3 * S, n_tokens)), prefill(whole, qkv)
    )


@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14)], ids=str)
def test_threads_change_nothing(bf16_isa: str, case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(8, n_tokens=3 * S, **shape.heads)
    before = _core.num_threads()
    try:
        outputs = []
        for n_threads in (1, 3):
            _core.set_num_threads(n_threads)
            outputs.append(run(case.make_policy(), shape, qkv, "bf16"))
    finally:
        _core.set_num_threads(before)
    np.testing.assert_array_equal(*outputs)


def test_values_that_are_not_finite_stay_with_their_queries(bf16_isa: str) -> None:
    """As in f32: what a query does not see does not reach it, in other row blocks at least."""
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    q, k, v = random_qkv(9, n_tokens=3 * S, **shape.heads)
    v[0, 2 * S + 5] = np.inf
    output = run(_core.dense_policy(), shape, (q, k, v), "bf16")
    assert np.isfinite(output[:, : 2 * S - 12]).all()
    assert not np.isfinite(output[:, 2 * S + 5 :]).any()


def test_bf16_takes_half_the_panels(bf16_isa: str) -> None:
    sizes = {"chunk_size": 256, "batch_size": 2048, "max_context": 2048}
    scratch = [
        _core.ChunkedAttention.estimate_bytes(
            _core.dense_policy(), 8, 8, 64, precision=name, **sizes
        )["scratch"]
        for name in ("f32", "bf16")
    ]
    panels = 2 * 8 * (2048 + 1024) * 64 * 4  # keys and values of the call, and of gathered memory
    assert panels * 0.45 < scratch[0] - scratch[1] < panels * 0.6


def test_names() -> None:
    for name in ("f16", "", "BF16"):
        with pytest.raises(ValueError, match=f"precision = '{name}' is not f32 or bf16"):
            _core.ChunkedAttention(
                _core.dense_policy(),
                1,
                1,
                8,
                chunk_size=8,
                batch_size=8,
                max_context=8,
                precision=name,
            )


def test_refused_where_the_instruction_set_has_none(isa: str) -> None:
    if _core.has_bf16_attention():
        return
    assert not _core.prefers_bf16_attention()
    with pytest.raises(ValueError, match=f"the instruction set {isa} has no bf16 attention"):
        run(_core.dense_policy(), Shape(), random_qkv(1, n_tokens=2, **Shape().heads), "bf16")
