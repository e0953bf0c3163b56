"""Decode: attention of one token to the cache, or to what a policy holds of the prompt."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Qkv, Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, gathered_type, stored
from tests.reference.dense import causal_attention
from tests.reference.headwise import HeadwiseLayer
from tests.reference.qkv import random_qkv
from tests.sparse.policies import POLICIES, PolicyCase

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("n_prompt", [1, 5, 255, 256, 257, 700])
@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
def test_equals_full_attention(n_prompt: int, cache_type: str) -> None:
    shape = Shape()
    qkv = random_qkv(1, n_tokens=n_prompt + 3, **shape.heads)
    q, k, v = (array.astype(np.float32) for array in qkv)
    cached_k, cached_v = (stored(array, cache_type) for array in (k, v))
    attention = make_attention(
        _core.dense_policy(), shape, chunk_size=64, max_context=n_prompt + 3, cache_type=cache_type
    )
    prefill(attention, (q, k, v), ends=(n_prompt,))
    for position in range(n_prompt, n_prompt + 3):
        end = position + 1
        expected = causal_attention(q[:, position:end], cached_k[:, :end], cached_v[:, :end])
        output = decode(attention, (q, k, v), position)
        np.testing.assert_allclose(output, expected, rtol=0, atol=DECODE_ATOL[cache_type])
    assert attention.position(0) == n_prompt + 3


@pytest.mark.parametrize("group", [1, 2, 4, 5, 9])
@pytest.mark.parametrize(
    ("head_dim", "cache_type"),
    [
        *itertools.product([8, 72, 80, 128, 256], ["f16", "f32"]),
        *itertools.product([32, 96, 128, 256], ["q8_0"]),
    ],
)
def test_head_shapes(group: int, head_dim: int, cache_type: str) -> None:
    shape = Shape(n_kv_heads=2, group=group, head_dim=head_dim)
    q, k, v = (
        array.astype(np.float16).astype(np.float64)
        for array in random_qkv(2, n_tokens=70, **shape.heads)
    )
    attention = make_attention(
        _core.dense_policy(), shape, chunk_size=64, max_context=70, cache_type=cache_type
    )
    prefill(attention, (q, k, v), ends=(69,))
    expected = causal_attention(q[:, 69:], stored(k, cache_type), stored(v, cache_type))
    output = decode(attention, (q, k, v), 69)
    np.testing.assert_allclose(output, expected, rtol=0, atol=DECODE_ATOL[cache_type])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 0},
        {"local": 60, "sinks": 0},
        {"tail": 20},
        {"max_past": 40},
        {"decode_pages": 20},
        {"decode_pages": 10},  # even the first prompt has enough for them
        {"decode_pages": 32, "max_past": 40},
        {"decode_budgets": (13, 20, 300)},
        {"decode_budgets": (5, 40, None), "decode_pages": 20},
        {"decode_budgets": (13, None, 9), "budgets": (13, None, None), "max_past": 40},
        {"decode_budgets": (None, None, 9), "budgets": (None, None, None)},
    ],
)
@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
def test_what_budgets_hold_of_the_prompt(cache_type: str, options: dict[str, Any]) -> None:
    """And what was generated since; several calls, and prompts on prompts."""
    kept_type = gathered_type(cache_type)
    settings = {"local": 8, "sinks": 3, "page_size": 16, "decode_from": 250} | options
    budgets = settings.pop("budgets", (13, 40, None))
    shape = Shape(n_kv_heads=3, group=3, head_dim=32)
    qkv = tuple(
        a.astype(np.float16).astype(np.float64) for a in random_qkv(6, n_tokens=640, **shape.heads)
    )
    attention = make_attention(
        _core.headwise_policy(list(budgets), **settings),
        shape,
        chunk_size=64,
        max_context=640,
        cache_type=cache_type,
    )
    oracle = HeadwiseLayer(
        chunk_size=64, budgets=budgets, store=lambda rows: stored(rows, kept_type), **settings
    )
    # A mean that lies at a rounding boundary may fall on either side.
    atol = 3 * DECODE_ATOL[kept_type]
    stores = [lambda a: a, *2 * [lambda a: stored(a, cache_type)]]
    cached = [store(a) for store, a in zip(stores, qkv, strict=True)]
    begin, reads_less = 0, []
    for n_prompt, n_decoded in [(200, 5), (80, 3), (200, 6)]:  # the first prompt is too short
        end = begin + n_prompt
        prefill(attention, tuple(a[:, begin:end] for a in qkv), stays_open=True)
        oracle.prefill(*(a[:, begin:end] for a in cached), is_last=True)
        for position in range(end, end + n_decoded):
            expected = oracle.decode(*(a[:, position : position + 1] for a in cached))
            output = decode(attention, qkv, position)
            np.testing.assert_allclose(output, expected, rtol=0, atol=atol)
        whole = causal_attention(
            cached[0][:, position : position + 1],
            *(a[:, : position + 1] for a in cached[1:]),
        )
        reads_less.append(float(np.abs(expected - whole).max()) > 1e-3)
        begin = end + n_decoded
    assert reads_less == [False, True, True]


def test_nothing_is_chosen_by_a_few_queries() -> None:
    """Of a prompt that is long by what was generated, and had no samples before."""
    shape = Shape(n_kv_heads=2, group=2, head_dim=32)
    qkv = tuple(
        a.astype(np.float16).astype(np.float64) for a in random_qkv(6, n_tokens=320, **shape.heads)
    )
    attention = make_attention(
        _core.headwise_policy([13, 40], local=8, sinks=3, page_size=16, decode_from=250),
        shape,
        chunk_size=64,
        max_context=320,
    )
    reads_less = []
    # Half of the queries are sampled: 3, and then 10 more.
    for begin, end, n_decoded in [(0, 100, 150), (250, 256, 4), (260, 280, 4)]:
        prefill(attention, tuple(a[:, begin:end] for a in qkv), stays_open=True)
        for position in range(end, end + n_decoded):
            output = decode(attention, qkv, position)
        whole = causal_attention(
            qkv[0][:, position : position + 1], *(a[:, : position + 1] for a in qkv[1:])
        )
        reads_less.append(float(np.abs(output - whole).max()) > 1e-2)
    assert reads_less == [False, False, True]


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_calls", [1, 3])
def test_budgets_of_kv_heads_after_sets_of_query_heads(n_calls: int, cache_type: str) -> None:
    """What tokens read does not depend on how the prompt was read."""
    kept_type = gathered_type(cache_type)
    budgets, settings = (13, 40, None), {"local": 8, "sinks": 3, "page_size": 16, "decode_from": 50}
    shape = Shape(n_kv_heads=3, group=3, head_dim=32)
    qkv = tuple(
        a.astype(np.float16).astype(np.float64) for a in random_qkv(7, n_tokens=402, **shape.heads)
    )
    outputs = []
    for heads in ([8, None, 30, 20, 300, 7, None, 9, 50], list(budgets), [None] * 3):
        policy = _core.headwise_policy(
            heads, by_query_head=len(heads) == 9, decode_budgets=list(budgets), **settings
        )
        attention = make_attention(
            policy, shape, chunk_size=64, max_context=402, cache_type=cache_type
        )
        ends = tuple(400 * i // n_calls for i in range(1, n_calls + 1))
        prefill(attention, qkv, ends=ends)
        outputs.append([decode(attention, qkv, position) for position in (400, 401)])
    for others in outputs[1:]:
        np.testing.assert_array_equal(others, outputs[0])
    oracle = HeadwiseLayer(
        chunk_size=64, budgets=budgets, store=lambda rows: stored(rows, kept_type), **settings
    )
    cached = [qkv[0], *(stored(a, cache_type) for a in qkv[1:])]
    for begin, end in zip((0, *ends), ends, strict=False):
        oracle.prefill(*(a[:, begin:end] for a in cached), is_last=end == 400)
    for output, position in zip(outputs[0], (400, 401), strict=True):
        expected = oracle.decode(*(a[:, position : position + 1] for a in cached))
        np.testing.assert_allclose(output, expected, rtol=0, atol=3 * DECODE_ATOL[kept_type])


@pytest.mark.parametrize("n_pages", [0, 8])
@pytest.mark.parametrize("goes_back", [None, 128, 192])
def test_copies_of_a_prompt_follow_a_conversation(n_pages: int, goes_back: int | None) -> None:
    """Turns that go on, and turns that go back and read something else, as read at once."""
    shape, n = Shape(n_kv_heads=2, group=2, head_dim=32), 320
    first, other = (random_qkv(seed, n_tokens=n, **shape.heads) for seed in (1, 2))

    def start() -> _core.ChunkedAttention:
        policy = _core.headwise_policy(
            [24, None], local=8, sinks=3, page_size=16, decode_from=64, decode_pages=n_pages
        )
        return make_attention(
            policy, shape, chunk_size=64, batch_size=64, max_context=n, cache_type="f16"
        )

    def read(attention: _core.ChunkedAttention, qkv: Qkv, begin: int, end: int) -> None:
        for at in range(begin, end, 64):
            attention.mark()
            prefill(attention, qkv, first=at, ends=(at + 64,), is_last=False, stays_open=True)
        attention.mark()

    begin = 192 if goes_back is None else goes_back
    joined = tuple(
        np.concatenate([a[:, :begin], b[:, begin:]], axis=1)
        for a, b in zip(first, other, strict=True)
    )
    told, once = start(), start()
    read(told, first, 0, 192)
    answers = [decode(told, first, 192), decode(told, first, 193)]
    told.rewind(begin)
    read(told, joined, begin, 256)
    read(once, joined, 0, 256)
    for position in (256, 257):
        output = decode(told, joined, position)
        np.testing.assert_array_equal(output, decode(once, joined, position))
    assert told.decode_bytes > 0 and np.isfinite(answers).all()


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_after_sparse_prefill_tokens_read_what_the_policy_says(case: PolicyCase) -> None:
    shape = Shape()
    qkv = random_qkv(3, n_tokens=201, **shape.heads)
    attention = make_attention(case.make_policy(), shape, chunk_size=64, max_context=201)
    prefill(attention, qkv, ends=(200,))
    oracle = case.make_oracle(64)
    oracle.prefill(*(array[:, :200] for array in qkv), is_last=True)
    expected = oracle.decode(*(array[:, 200:] for array in qkv))
    np.testing.assert_allclose(decode(attention, qkv, 200), expected, atol=1e-5)


def test_large_logits() -> None:
    shape = Shape()
    q, k, v = random_qkv(4, n_tokens=300, **shape.heads)
    q *= 100.0 / np.abs(q.reshape(2, 3, 300, 64) @ k[:, None].swapaxes(2, 3) / 8.0).max()
    attention = make_attention(_core.dense_policy(), shape, chunk_size=64, max_context=300)
    prefill(attention, (q, k, v), ends=(299,))
    expected = causal_attention(q[:, 299:], k, v)
    np.testing.assert_allclose(decode(attention, (q, k, v), 299), expected, atol=2e-4)


@pytest.mark.usefixtures("keep_threads")
def test_threads_do_not_change_a_bit() -> None:
    shape = Shape(group=2, head_dim=16)
    qkv = random_qkv(5, n_tokens=900, **shape.heads)
    outputs = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        attention = make_attention(_core.dense_policy(), shape, chunk_size=300, max_context=900)
        prefill(attention, qkv, ends=(899,))
        outputs.append(decode(attention, qkv, 899))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])
