"""What generated tokens read by a rule in Python: positions, pages, what a prompt left."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.errors import UsageError
from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, stored
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array
from tests.sparse.python_rules import CLOSE, N_TOKENS, SHAPE, S

pytestmark = pytest.mark.usefixtures("isa")


class EveryOther:
    """In decode, every ``step``-th past position of KV head 0, and nothing of the others."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.n_past: list[int] = []

    def select_memory(self, layer: int, kv_head: int, chunk: tuple[int, int], *_: Array) -> Array:
        return np.arange(chunk[0])

    def select_decode(
        self, layer: int, kv_head: int, chunk: tuple[int, int], q: Array, k: Array, v: Array
    ) -> Array:
        assert (q.shape, k.shape) == ((1, SHAPE.group, SHAPE.head_dim), (chunk[0], SHAPE.head_dim))
        self.n_past.append(len(v))
        return np.arange(0, chunk[0], self.step) if kv_head == 0 else np.arange(0)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_decode_reads_what_the_rule_says(cache_type: str) -> None:
    n_prompt, n_all, step = 700, 704, 2  # more than one range of keys
    qkv = random_qkv(8, n_tokens=n_all, **SHAPE.heads)
    rule = EveryOther(step)
    policy = _core.python_policy(rule)
    sizes = {"chunk_size": S, "max_context": n_all, "cache_type": cache_type}
    attention = make_attention(policy, SHAPE, **sizes)
    prefill(attention, qkv, ends=(n_prompt,))
    q, k, v = qkv
    for position in range(n_prompt, n_all):
        output = decode(attention, qkv, position)
        for head in range(SHAPE.n_heads):
            kv_head = head // SHAPE.group
            past = np.arange(0, position, step) if kv_head == 0 else np.arange(0)
            keys = np.append(past, position)
            logits = k[kv_head, keys] @ q[head, position] * SHAPE.head_dim**-0.5
            weights = np.exp(logits - logits.max())
            expected = weights / weights.sum() @ v[kv_head, keys]
            tolerance = 2e-5 if cache_type == "f32" else 2e-3
            np.testing.assert_allclose(output[head, 0], expected, rtol=0, atol=tolerance)
    assert rule.n_past == [n for n in range(n_prompt, n_all) for _ in range(SHAPE.n_kv_heads)]


class ReadsPages(EveryOther):
    """Two pages of four of three; head 1 so that no four of its list are a page."""

    def select_decode(self, layer: int, kv_head: int, chunk: tuple[int, int], *_: Array) -> Array:
        return _pages_of(kv_head, chunk[0])


def _pages_of(kv_head: int, n_past: int) -> Array:
    position = np.arange(n_past)
    is_read = (position // 4 % 3 > 0) & (position > kv_head % 2 * 6)
    is_read[0] |= kv_head == 1
    return position[is_read]


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_pages_are_read_where_they_lie(cache_type: str) -> None:
    shape = Shape(n_kv_heads=2, group=3, head_dim=32)
    n_prompt, n_all = 901, 904  # two ranges of pages that are full, and one that ends anywhere
    qkv = random_qkv(11, n_tokens=n_all, **shape.heads)
    policy = _core.python_policy(ReadsPages(1))
    sizes = {"chunk_size": S, "max_context": n_all, "cache_type": cache_type}
    attention = make_attention(policy, shape, **sizes)
    prefill(attention, qkv, ends=(n_prompt,))
    q, k, v = qkv[0], *(stored(array, cache_type) for array in qkv[1:])
    for position in range(n_prompt, n_all):
        output = decode(attention, qkv, position)
        for head in range(shape.n_heads):
            kv_head = head // shape.group
            keys = np.append(_pages_of(kv_head, position), position)
            assert len(keys) > 2 * 256
            logits = k[kv_head, keys] @ q[head, position] * shape.head_dim**-0.5
            weights = np.exp(logits - logits.max())
            expected = weights / weights.sum() @ v[kv_head, keys]
            tolerance = 3 * DECODE_ATOL[cache_type]
            np.testing.assert_allclose(output[head, 0], expected, rtol=0, atol=tolerance)


def test_a_rule_that_fails_in_decode_says_where() -> None:
    class Failing(EveryOther):
        def select_decode(self, *args: object) -> Array:
            return np.array([5, 3])

    attention = make_attention(
        _core.python_policy(Failing(1)), SHAPE, chunk_size=S, max_context=N_TOKENS
    )
    qkv = random_qkv(9, n_tokens=S + 1, **SHAPE.heads)
    prefill(attention, qkv, ends=(S,))
    with pytest.raises(UsageError, match=r"select_decode.*layer 0, KV head 0.*must ascend"):
        decode(attention, qkv, S)


class HoldsSome:
    """Of a prompt: every third position and one row that stands for the rest; nothing in head 1."""

    def __init__(self) -> None:
        self.n_asked = 0

    def select_memory(self, layer: int, kv_head: int, chunk: tuple[int, int], *_: Array) -> Array:
        return np.arange(chunk[0])

    def end_prompt(
        self, layer: int, kv_head: int, n_tokens: int, k: Array, v: Array
    ) -> tuple[Array, Array, Array, Array] | Array:
        assert k.shape == v.shape == (n_tokens, SHAPE.head_dim)
        self.n_asked += 1
        if kv_head == 1:
            return np.arange(0)
        mean = k.mean(axis=0, keepdims=True), v.mean(axis=0, keepdims=True)
        return np.arange(kv_head, n_tokens, 3), *mean, np.log([n_tokens / 2])


def test_generated_tokens_read_what_the_end_of_the_prompt_said() -> None:
    n_prompt, n_all = 800, 810  # more than one range of rows
    q, k, v = qkv = random_qkv(10, n_tokens=n_all, **SHAPE.heads)
    rule = HoldsSome()
    attention = make_attention(_core.python_policy(rule), SHAPE, chunk_size=S, max_context=n_all)
    prefill(attention, qkv, ends=(n_prompt,))
    assert rule.n_asked == 0
    for position in range(n_prompt, n_all):
        output = decode(attention, qkv, position)
        for head in range(SHAPE.n_heads):
            kv_head = head // SHAPE.group
            read = np.arange(n_prompt, position + 1)
            keys, values, biases = k[kv_head, read], v[kv_head, read], np.zeros(len(read))
            if kv_head != 1:
                held = np.arange(kv_head, n_prompt, 3)
                prompt = slice(0, n_prompt)
                keys = np.concatenate([keys, k[kv_head, held], [k[kv_head, prompt].mean(axis=0)]])
                values = np.concatenate(
                    [values, v[kv_head, held], [v[kv_head, prompt].mean(axis=0)]]
                )
                biases = np.concatenate([biases, np.zeros(len(held)), np.log([n_prompt / 2])])
            logits = keys @ q[head, position] * SHAPE.head_dim**-0.5 + biases
            weights = np.exp(logits - logits.max())
            expected = weights / weights.sum() @ values
            np.testing.assert_allclose(output[head, 0], expected, **CLOSE)
    assert rule.n_asked == SHAPE.n_kv_heads


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([5, 3], "must ascend"),
        ([S], "is not before the chunk"),
        ((np.arange(S), np.zeros((1, 16)), np.zeros((1, 16)), [0.0]), "more than the 32 tokens"),
    ],
)
def test_an_answer_about_the_prompt_that_cannot_be_used(answer: object, message: str) -> None:
    class Failing(HoldsSome):
        def end_prompt(self, *_: object) -> object:
            return answer

    attention = make_attention(
        _core.python_policy(Failing()), SHAPE, chunk_size=S, max_context=N_TOKENS
    )
    qkv = random_qkv(9, n_tokens=S + 1, **SHAPE.heads)
    prefill(attention, qkv, ends=(S,))
    with pytest.raises(UsageError, match=rf"end_prompt.*layer 0, KV head.*{message}"):
        decode(attention, qkv, S)
