"""Chunked attention against the float64 oracles, and its exact invariances."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.joined_cases import for_each
from tests.ops.attention_case import Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.h2o import H2OLayer
from tests.reference.pairs import pairs_chunked, pairs_dense
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase, h2o_case

S = 64
# Values are of size 1. Float32 logits of size 10 are off by about 1e-6, and weights by as much.
CLOSE = {"rtol": 0.0, "atol": 2e-5}

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("case", POLICIES, ids=str)
@for_each("n_tokens", [1, S, S + 1, 2 * S - 1, 2 * S + 16, 4 * S])
def test_output_equals_the_oracle(case: PolicyCase, n_tokens: int) -> None:
    shape = Shape()
    qkv = random_qkv(1, n_tokens=n_tokens, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=n_tokens)
    np.testing.assert_allclose(prefill(attention, qkv), case.make_oracle(S).prefill(*qkv), **CLOSE)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 128])
def test_head_shapes(group: int, head_dim: int) -> None:
    shape = Shape(n_kv_heads=2, group=group, head_dim=head_dim)
    qkv = random_qkv(2, n_tokens=150, **shape.heads)
    case = h2o_case(9, 14)
    attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=150)
    np.testing.assert_allclose(prefill(attention, qkv), case.make_oracle(S).prefill(*qkv), **CLOSE)


@pytest.mark.parametrize("chunk_size", [1, 7, 33, 96, 1000])
@pytest.mark.parametrize("case", [DENSE, h2o_case(9, 14)], ids=str)
def test_chunk_sizes(case: PolicyCase, chunk_size: int) -> None:
    shape = Shape(n_kv_heads=1)
    qkv = random_qkv(3, n_tokens=130, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=chunk_size, max_context=130)
    expected = case.make_oracle(chunk_size).prefill(*qkv)
    np.testing.assert_allclose(prefill(attention, qkv), expected, **CLOSE)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_large_logits(case: PolicyCase) -> None:
    shape = Shape()
    q, k, v = random_qkv(4, n_tokens=2 * S + 16, **shape.heads)
    logits = np.einsum("hgnd,hmd->hgnm", q.reshape(2, 3, -1, 64), k) / 8.0
    q *= 100.0 / np.abs(logits).max()
    attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=2 * S + 16)
    # Float32 logits of size 100 are off by 1e-5, and weights by the same fraction.
    expected = case.make_oracle(S).prefill(q, k, v)
    np.testing.assert_allclose(prefill(attention, (q, k, v)), expected, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize("case", [DENSE, h2o_case(16, 16)], ids=str)
def test_half_precision_cache_rounds_keys_and_values(case: PolicyCase) -> None:
    shape = Shape()
    q, k, v = (array.astype(np.float32) for array in random_qkv(5, n_tokens=3 * S, **shape.heads))
    attention = make_attention(
        case.make_policy(), shape, chunk_size=S, max_context=3 * S, cache_type="f16"
    )
    output = prefill(attention, (q, k, v))
    k, v = (array.astype(np.float16).astype(np.float64) for array in (k, v))
    np.testing.assert_array_equal(attention.cache.keys(0), k)
    np.testing.assert_array_equal(attention.cache.values(0), v)
    np.testing.assert_allclose(output, case.make_oracle(S).prefill(q, k, v), **CLOSE)


@pytest.mark.parametrize("case", [DENSE, h2o_case(400, 2000)], ids=str)
def test_memory_beyond_one_piece_equals_dense(case: PolicyCase) -> None:
    """More than 1,024 past keys are attended to in pieces and merged."""
    shape = Shape(n_kv_heads=2, group=1, head_dim=16)
    qkv = random_qkv(6, n_tokens=2300, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=256, max_context=2300)
    np.testing.assert_allclose(prefill(attention, qkv), causal_attention(*qkv), **CLOSE)


@pytest.mark.parametrize("case", POLICIES, ids=str)
@for_each("ends", [(S,), (2 * S, 3 * S), (3 * S,), (S, 2 * S, 3 * S)])
def test_several_calls_equal_one_exactly(case: PolicyCase, ends: tuple[int, ...]) -> None:
    shape = Shape()
    n_tokens = 3 * S + 17
    qkv = random_qkv(7, n_tokens=n_tokens, **shape.heads)
    whole, split = (
        make_attention(case.make_policy(), shape, chunk_size=S, max_context=n_tokens)
        for _ in range(2)
    )
    expected = prefill(whole, qkv)
    np.testing.assert_array_equal(prefill(split, qkv, ends=(*ends, n_tokens)), expected)
    for head in range(shape.n_kv_heads):
        np.testing.assert_array_equal(
            split.policy.memory_set(0, head), whole.policy.memory_set(0, head)
        )
    assert split.pairs_computed == whole.pairs_computed


def test_several_calls_equal_one_exactly_where_memory_has_pieces() -> None:
    """Positions of earlier calls come from the cache, those of this call from its own panels."""
    shape = Shape(n_kv_heads=2, group=1, head_dim=16)
    qkv = random_qkv(8, n_tokens=3300, **shape.heads)
    outputs = [
        prefill(
            make_attention(_core.dense_policy(), shape, chunk_size=256, max_context=3300),
            qkv,
            ends=ends,
        )
        for ends in ((3300,), (1280, 2560, 3300))
    ]
    np.testing.assert_array_equal(outputs[1], outputs[0])


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_threads_do_not_change_a_bit(case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(9, n_tokens=3 * S + 5, **shape.heads)
    results = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=3 * S + 5)
        results.append((prefill(attention, qkv, is_last=False), *attention.state()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_a_second_prompt_repeats_the_first(case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(10, n_tokens=2 * S + 5, **shape.heads)
    other = random_qkv(11, n_tokens=2 * S + 9, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=2 * S + 9)
    first = prefill(attention, qkv)
    attention.reset()
    prefill(attention, other)
    attention.reset()
    np.testing.assert_array_equal(prefill(attention, qkv), first)


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_the_end_of_a_prompt_changes_no_output(case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(12, n_tokens=2 * S + 5, **shape.heads)
    outputs = [
        prefill(
            make_attention(case.make_policy(), shape, chunk_size=S, max_context=2 * S + 5),
            qkv,
            is_last=is_last,
        )
        for is_last in (False, True)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_state_is_the_softmax_state_of_all_visible_keys() -> None:
    shape = Shape()
    q, k, v = random_qkv(13, n_tokens=2 * S, **shape.heads)
    layer = H2OLayer(chunk_size=S, local=16, heavy=16)
    expected = layer.prefill(q, k, v)
    attention = make_attention(_core.h2o_policy(16, 16), shape, chunk_size=S, max_context=2 * S)
    prefill(attention, (q, k, v))
    m, l, o = attention.state()  # noqa: E741
    np.testing.assert_allclose(o.transpose(1, 0, 2), expected, **CLOSE)
    chunk = layer.chunks[1]
    top = np.maximum(chunk.intra.m, chunk.inter.m)
    total = sum(part.l * np.exp(part.m - top) for part in (chunk.intra, chunk.inter))
    for actual, wanted in ((m, top), (l, total)):
        by_head = actual[S:].T.reshape(2, 3, S)
        np.testing.assert_allclose(by_head, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_tokens", [S, S + 1, 3 * S, 3 * S + 7])
@pytest.mark.parametrize("case", [case for case in POLICIES if not case.has_landmarks], ids=str)
def test_pairs_are_counted_exactly(case: PolicyCase, n_tokens: int) -> None:
    shape = Shape(head_dim=8)
    attention = make_attention(case.make_policy(), shape, chunk_size=S, max_context=n_tokens)
    prefill(attention, random_qkv(14, n_tokens=n_tokens, **shape.heads))
    counts = [
        pairs_dense(n_tokens)
        if budget is None
        else pairs_chunked(n_tokens, chunk_size=S, memory_size=budget)
        for budget in case.budgets
    ]
    assert attention.pairs_computed == sum(counts) // len(counts)
    attention.reset()
    assert attention.pairs_computed == 0


def test_rows_that_are_not_numbers_stay_in_their_rows() -> None:
    shape = Shape(n_kv_heads=1)
    q, k, v = random_qkv(15, n_tokens=3 * S, **shape.heads)
    q[0, 10] = np.nan
    attention = make_attention(_core.h2o_policy(8, 8), shape, chunk_size=S, max_context=3 * S)
    output = prefill(attention, (q, k, v))
    assert np.isnan(output[0, 10]).all()
    output[0, 10] = 0.0
    assert np.isfinite(output).all()
