"""Prefill attention of narrower products than f32: what they round, how far from f32 that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Qkv, Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.integers import INTEGERS, causal_integer_attention
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array
from tests.sparse.policies import DENSE, POLICIES, PolicyCase, h2o_case

S = 64


class Bounds(NamedTuple):
    """Of a precision, for queries, keys and values of size 1 and 64 dimensions or fewer.

    Attributes:
        largest, mean: error of an output against f32.
        sums, largest_sum: error of most outputs, and of all, against products of rounded operands
            that are summed exactly.
    """

    largest: float
    mean: float
    sums: float
    largest_sum: float


# bf16 keeps 8 bits: a value is off by 2^-9 of itself at most, a logit of 64 products of size 1 by
# some 2^-9, and a weight by as much. Values are of size 1, outputs mean over several of them.
# f16 keeps 11 bits, and so do sums of 32 products.
# Integers: test_integer_attention.py has the bound of each output; a weight at the border of two
# levels moves it by 1/255, or 1/8191, of values of size 1.
F16_TERMS = 32
BOUNDS = {
    "bf16": Bounds(0.05, 4e-3, 2e-5, 4e-3),
    "f16": Bounds(0.02, 1e-3, 3e-3, 0.01),
    "int8": Bounds(0.08, 6e-3, 4e-3, 0.02),
    "int16": Bounds(0.01, 5e-4, 2e-4, 2e-3),
}
# Of the panels of keys and values in f32, what others spare at least.
SPARED = {"bf16": (0.45, 0.6), "f16": (0.45, 0.6), "int8": (0.65, 1.0), "int16": (0.4, 0.6)}


def _available() -> Iterator[tuple[str, str]]:
    before = _core.active_isa()
    for isa in _core.available_isas():
        _core.use_isa(isa)
        for name in _core.attention_precisions():
            if name != "f32":
                yield isa, name
    _core.use_isa(before)


NARROW = list(_available())


@pytest.fixture(params=NARROW, ids="-".join)
def narrow(request: pytest.FixtureRequest) -> str:
    """A precision other than f32, with an instruction set in use that has it."""
    isa, name = request.param
    _core.use_isa(isa)
    return name


def rounded(x: Array, precision: str) -> Array:
    """Rounded to nearest even, as values of the type that came in."""
    if precision == "f16":
        return x.astype(np.float16).astype(x.dtype)
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(x.dtype)


def run(
    policy: _core.SparsePolicy, shape: Shape, qkv: Qkv, precision: str, **options: object
) -> Array:
    n_tokens = qkv[0].shape[1]
    sizes = {"chunk_size": S, "max_context": n_tokens, **options}
    return prefill(make_attention(policy, shape, precision=precision, **sizes), qkv)  # type: ignore[arg-type]


def rounding_oracle(qkv: Qkv, precision: str) -> Array:
    """Dense attention of one chunk; logits are in base 2, so that the scale rounds nothing.

    The weights 2^(logit - maximum) are rounded where they meet values, but not in their sum.
    """
    q, k, v = qkv
    group = q.shape[0] // k.shape[0]
    outputs = []
    for head, query in enumerate(q):
        if precision in INTEGERS:
            integers = INTEGERS[precision]
            outputs.append(
                causal_integer_attention(query, k[head // group], v[head // group], integers)[0]
            )
            continue
        logits = rounded(query, precision) @ rounded(k[head // group], precision).T
        logits[~np.tri(*logits.shape, dtype=bool)] = -np.inf
        weights = np.exp2(logits - logits.max(axis=1, keepdims=True))
        products = rounded(weights, precision) @ rounded(v[head // group], precision)
        outputs.append(products / weights.sum(axis=1, keepdims=True))
    return np.stack(outputs)


@pytest.mark.parametrize("n_tokens", [1, 2, 33, S - 1, 150])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (1, 8), (4, 72), (7, 80), (2, 128)])
def test_rounds_what_it_multiplies_and_nothing_else(
    narrow: str, group: int, head_dim: int, n_tokens: int
) -> None:
    shape = Shape(group=group, head_dim=head_dim)
    q, k, v = random_qkv(1, n_tokens=n_tokens, **shape.heads)
    q /= np.sqrt(head_dim)
    output = run(
        _core.dense_policy(), shape, (q, k, v), narrow, chunk_size=256, scale=float(np.log(2))
    )
    error = np.abs(output - rounding_oracle((q, k, v), narrow))
    # A logit that float32 has on the other side of a weight's rounding border moves one weight.
    assert np.quantile(error, 0.98) < BOUNDS[narrow].sums
    assert error.max() < BOUNDS[narrow].largest_sum


def short_sums(terms: Array) -> Array:
    """Sums over the last axis as f16 has them: 32 fused products at a time, those sums exactly."""
    total = np.zeros(terms.shape[:-1])
    for begin in range(0, terms.shape[-1], F16_TERMS):
        part = np.zeros(terms.shape[:-1], np.float16)
        for i in range(begin, min(begin + F16_TERMS, terms.shape[-1])):
            part = (part.astype(np.float64) + terms[..., i]).astype(np.float16)
        total += part
    return total


@pytest.mark.parametrize(
    "narrow", [case for case in NARROW if case[1] == "f16"], indirect=True, ids="-".join
)
@pytest.mark.parametrize(("n_tokens", "head_dim"), [(5, 8), (21, 24), (40, 64)])
def test_f16_adds_some_products_at_a_time(narrow: str, n_tokens: int, head_dim: int) -> None:
    shape = Shape(n_kv_heads=1, group=1, head_dim=head_dim)
    q, k, v = (
        rounded(x, "f16").astype(np.float64)
        for x in random_qkv(3, n_tokens=n_tokens, **shape.heads)
    )
    output = run(
        _core.dense_policy(), shape, (q, k, v), "f16", chunk_size=64, scale=float(np.log(2))
    )
    logits = short_sums(q[0, :, None] * k[0])
    logits[~np.tri(n_tokens, dtype=bool)] = -np.inf
    weights = np.exp2(logits - logits.max(axis=1, keepdims=True))
    sums = short_sums(rounded(weights, "f16")[:, None] * v[0].T)
    np.testing.assert_allclose(
        output[0], sums / weights.sum(axis=1, keepdims=True), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("n_tokens", [S + 1, 4 * S])
@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_is_near_f32(narrow: str, case: PolicyCase, n_tokens: int) -> None:
    """Rules that count attention choose nearly the same keys, so that most outputs are near."""
    shape = Shape()
    qkv = random_qkv(1, n_tokens=n_tokens, **shape.heads)
    outputs, chosen = [], []
    for precision in ("f32", narrow):
        attention = make_attention(
            case.make_policy(), shape, chunk_size=S, max_context=n_tokens, precision=precision
        )
        outputs.append(prefill(attention, qkv))
        chosen.append(
            [(h, p) for h in range(2) for p in attention.policy.memory_set(0, h).tolist()]
        )
    error = np.abs(outputs[1] - outputs[0])
    assert 0 < np.median(error) < BOUNDS[narrow].mean
    assert len(set(chosen[0]) & set(chosen[1])) >= 0.8 * len(chosen[0])
    if n_tokens == S + 1:  # nothing was chosen by weights of a memory yet
        assert error[:, :S].mean() < BOUNDS[narrow].mean
        assert error[:, :S].max() < BOUNDS[narrow].largest


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("window", [0, 1, 40, 100])
def test_windows_and_cache_types(narrow: str, window: int, cache_type: str) -> None:
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
        for precision in ("f32", narrow)
    ]
    error = np.abs(outputs[1] - outputs[0])
    assert error.any() or window == 1  # the value itself, which a cache in f16 holds exactly
    assert error.mean() < BOUNDS[narrow].mean
    assert error.max() < BOUNDS[narrow].largest


@pytest.mark.parametrize("n_tokens", [1100, 2300])
def test_memory_beyond_one_piece(narrow: str, n_tokens: int) -> None:
    shape = Shape(n_kv_heads=2, group=1, head_dim=16)
    qkv = random_qkv(6, n_tokens=n_tokens, **shape.heads)
    error = np.abs(
        run(_core.dense_policy(), shape, qkv, narrow, chunk_size=256) - causal_attention(*qkv)
    )
    assert error.mean() < BOUNDS[narrow].mean
    assert error.max() < BOUNDS[narrow].largest


@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14)], ids=str)
def test_several_calls_equal_one_exactly(narrow: str, case: PolicyCase) -> None:
    shape = Shape()
    n_tokens = 3 * S + 17
    qkv = random_qkv(7, n_tokens=n_tokens, **shape.heads)
    whole, split = (
        make_attention(
            case.make_policy(), shape, chunk_size=S, max_context=n_tokens, precision=narrow
        )
        for _ in range(2)
    )
    np.testing.assert_array_equal(
        prefill(split, qkv, ends=(S, 3 * S, n_tokens)), prefill(whole, qkv)
    )


@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14)], ids=str)
def test_threads_change_nothing(narrow: str, case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(8, n_tokens=3 * S, **shape.heads)
    before = _core.num_threads()
    try:
        outputs = []
        for n_threads in (1, 3):
            _core.set_num_threads(n_threads)
            outputs.append(run(case.make_policy(), shape, qkv, narrow))
    finally:
        _core.set_num_threads(before)
    np.testing.assert_array_equal(*outputs)


def test_values_that_are_not_finite_stay_with_their_queries(narrow: str) -> None:
    """As in f32: what a query does not see does not reach it, in other row blocks at least."""
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    q, k, v = random_qkv(9, n_tokens=3 * S, **shape.heads)
    v[0, 2 * S + 5] = np.inf
    output = run(_core.dense_policy(), shape, (q, k, v), narrow)
    assert np.isfinite(output[:, : 2 * S - 12]).all()
    assert not np.isfinite(output[:, 2 * S + 5 :]).any()


def test_panels_take_fewer_bytes(narrow: str) -> None:
    sizes = {"chunk_size": 256, "batch_size": 2048, "max_context": 2048}
    scratch = [
        _core.ChunkedAttention.estimate_bytes(
            _core.dense_policy(), 8, 8, 64, precision=name, **sizes
        )["scratch"]
        for name in ("f32", narrow)
    ]
    panels = 2 * 8 * (2048 + 1024) * 64 * 4  # keys and values of the call, and of gathered memory
    least, most = SPARED[narrow]
    assert panels * least < scratch[0] - scratch[1] < panels * most


def test_names() -> None:
    for name in ("f64", "", "BF16"):
        with pytest.raises(
            ValueError, match=f"precision = '{name}' is not f32, bf16, f16, int8 or int16"
        ):
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


@pytest.mark.parametrize("precision", ["bf16", "f16", "int8", "int16"])
def test_refused_where_the_instruction_set_has_none(isa: str, precision: str) -> None:
    if precision in _core.attention_precisions():
        return
    assert _core.best_attention_precision() != precision
    with pytest.raises(ValueError, match=f"the instruction set {isa} has no {precision} attention"):
        run(_core.dense_policy(), Shape(), random_qkv(1, n_tokens=2, **Shape().heads), precision)
