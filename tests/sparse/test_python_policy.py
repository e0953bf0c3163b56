"""The whole policy interface, driven from Python: budgets per head, synthetic rows, joint sums."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.errors import UsageError
from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, stored
from tests.reference.dense import causal_attention
from tests.reference.h2o import H2OLayer
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array
from tests.sparse.budget_rule import FULL, BudgetRule, Selection

S = 32
N_TOKENS = 9 * S + 13
SHAPE = Shape(n_kv_heads=4, group=3, head_dim=16)
# A head smaller than the local window, two that are larger than a chunk, and a dense one.
BUDGETS = (7, 40, 100, FULL)
CLOSE = {"rtol": 0.0, "atol": 2e-5}

pytestmark = pytest.mark.usefixtures("isa")


def make_policy(rule: object, *, column_sums: str = "joint") -> _core.SparsePolicy:
    return _core.python_policy(rule, column_sums=column_sums, max_memory=100, max_synthetic=32)


def attend_jointly(
    qkv: tuple[Array, Array, Array], kv_head: int, selection: Selection
) -> tuple[Array, Array]:
    """Output [group, n, d] and joint weights [group, n, n_keys], float64.

    The keys are the memory positions, the chunk, and the synthetic rows, in this order.
    """
    q, k, v = qkv
    begin, end = selection.chunk
    own = np.arange(begin, end)
    positions = np.concatenate([selection.positions, own])
    keys = np.concatenate([k[kv_head, positions], selection.keys])
    values = np.concatenate([v[kv_head, positions], selection.values])
    queries = q[kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group, begin:end]
    logits = queries @ keys.T * SHAPE.head_dim**-0.5
    logits[:, :, len(positions) :] += selection.biases
    logits[:, :, : len(positions)][:, positions[None, :] > own[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ values, weights


@pytest.mark.parametrize("column_sums", ["joint", "part", "none"])
@pytest.mark.parametrize("with_pages", [True, False], ids=["pages", "no-pages"])
def test_budgets_synthetic_rows_and_column_sums(column_sums: str, with_pages: bool) -> None:
    qkv = random_qkv(1, n_tokens=N_TOKENS, **SHAPE.heads)
    rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS, with_pages=with_pages)
    policy = make_policy(rule, column_sums=column_sums)
    attention = make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS)
    output = prefill(attention, qkv, is_last=False)
    n_pairs = 0
    for head, budget in enumerate(BUDGETS):
        assert len(rule.selections[head]) == 9
        for selection in rule.selections[head]:
            begin, end = selection.chunk
            n_memory = len(selection.positions)
            assert n_memory == min(budget, begin)
            expected, weights = attend_jointly(qkv, head, selection)
            group = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
            np.testing.assert_allclose(output[group, begin:end], expected, **CLOSE)
            n_pairs += (end - begin) * (n_memory + len(selection.biases))
            if budget == FULL or column_sums == "none":
                assert selection.memory_sums is None and selection.intra_sums is None
                continue
            memory, intra = weights[..., :n_memory], weights[..., n_memory:][..., : end - begin]
            if column_sums == "part":
                memory = memory / memory.sum(axis=-1, keepdims=True)
                intra = intra / intra.sum(axis=-1, keepdims=True)
            sums = {"rtol": 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(selection.memory_sums, memory.sum(axis=(0, 1)), **sums)
            np.testing.assert_allclose(selection.intra_sums, intra.sum(axis=(0, 1)), **sums)
    n_intra = sum(n * (n + 1) // 2 for n in [S] * 9 + [13])
    assert attention.pairs_computed == n_intra + n_pairs // len(BUDGETS)


@pytest.mark.parametrize("ends", [(3 * S,), (S, 4 * S, 5 * S)], ids=str)
@pytest.mark.parametrize("column_sums", ["joint", "part"])
def test_several_calls_equal_one_exactly(column_sums: str, ends: tuple[int, ...]) -> None:
    qkv = random_qkv(2, n_tokens=N_TOKENS, **SHAPE.heads)
    outputs = []
    for calls in ((N_TOKENS,), (*ends, N_TOKENS)):
        rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS)
        policy = make_policy(rule, column_sums=column_sums)
        attention = make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS)
        outputs.append(prefill(attention, qkv, ends=calls))
    np.testing.assert_array_equal(outputs[1], outputs[0])


@pytest.mark.usefixtures("keep_threads")
def test_threads_do_not_change_a_bit() -> None:
    qkv = random_qkv(3, n_tokens=N_TOKENS, **SHAPE.heads)
    outputs = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS)
        attention = make_attention(make_policy(rule), SHAPE, chunk_size=S, max_context=N_TOKENS)
        outputs.append(prefill(attention, qkv))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


def test_full_heads_beyond_one_piece_are_dense() -> None:
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    qkv = random_qkv(4, n_tokens=2600, **shape.heads)
    rule = BudgetRule((FULL,), local=0, max_context=2600, with_pages=False)
    attention = make_attention(make_policy(rule), shape, chunk_size=512, max_context=2600)
    np.testing.assert_allclose(prefill(attention, qkv), causal_attention(*qkv), **CLOSE)


class H2OInPython:
    """The rule of H2OPolicy, to be compared with it."""

    def __init__(self, local: int, heavy: int, max_context: int, n_kv_heads: int) -> None:
        self.local, self.heavy = local, heavy
        self.scores = np.zeros((n_kv_heads, max_context), dtype=np.float32)
        self.previous = [(np.zeros(0, dtype=np.int64), 0)] * n_kv_heads

    def select_memory(self, layer, kv_head, chunk, queries, past_keys, past_values):  # type: ignore[no-untyped-def]
        from tests.reference.heavy_hitters import select_memory

        memory, begin = self.previous[kv_head]
        scores = self.scores[kv_head].astype(np.float64)
        positions, _ = select_memory(
            scores, memory, (begin, chunk[0]), local=self.local, heavy=self.heavy
        )
        self.previous[kv_head] = (positions, chunk[0])
        return positions

    def observe_intra(self, layer, kv_head, chunk, sums):  # type: ignore[no-untyped-def]
        self.scores[kv_head, chunk[0] : chunk[1]] += sums

    def observe_memory(self, layer, kv_head, chunk, positions, sums):  # type: ignore[no-untyped-def]
        self.scores[kv_head, positions] += sums


def test_h2o_in_python_equals_h2o_exactly() -> None:
    qkv = random_qkv(5, n_tokens=N_TOKENS, **SHAPE.heads)
    twins = (
        _core.h2o_policy(6, 10),
        make_policy(H2OInPython(6, 10, N_TOKENS, SHAPE.n_kv_heads), column_sums="part"),
    )
    outputs = [
        prefill(make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS), qkv)
        for policy in twins
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    layer = H2OLayer(chunk_size=S, local=6, heavy=10)
    layer.prefill(*qkv)
    for head in range(SHAPE.n_kv_heads):
        np.testing.assert_array_equal(twins[0].memory_set(0, head), twins[1].memory_set(0, head))


class Selecting:
    """Returns one fixed answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def select_memory(self, *args: object) -> object:
        return self.answer


class Raising(Selecting):
    """Fails in one method."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__([])
        self.method, self.error = method, error

    def _raise_in(self, method: str) -> None:
        if method == self.method:
            raise self.error

    def begin_prompt(self) -> None:
        self._raise_in("begin_prompt")

    def is_scored(self, layer: int, kv_head: int) -> bool:
        if kv_head == 2:
            self._raise_in("is_scored")
        return True

    def observe_intra(self, layer: int, kv_head: int, *_: object) -> None:
        if kv_head == 2:
            self._raise_in("observe_intra")


def prefill_with(rule: object, chunk_size: int = S) -> None:
    """One chunk, which asks the rule nothing, and a token of the next one."""
    n_tokens = chunk_size + 1
    attention = make_attention(
        make_policy(rule), SHAPE, chunk_size=chunk_size, max_context=n_tokens
    )
    prefill(attention, random_qkv(6, n_tokens=n_tokens, **SHAPE.heads))


ROW = np.zeros((1, SHAPE.head_dim))
SHAPE_OF_POSITIONS = r"positions must be a one-dimensional array of integers.*got "


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1, 1], "position 1 after 1: positions must ascend"),
        ([3, 2], "position 2 after 3: positions must ascend"),
        ([-1], f"position -1 is not before the chunk, which begins at {S}"),
        ([0, S], f"position {S} is not before the chunk, which begins at {S}"),
        (np.array([2**32]), f"position {2**32} is not before the chunk"),
        (np.array([2**64 - 1], np.uint64), "is not before the chunk"),
        (np.ones(S, bool), SHAPE_OF_POSITIONS + r"numpy.ndarray \(bool, shape \(32,\)\)"),
        ([0.5, 1.5], SHAPE_OF_POSITIONS + r"list \(float64, shape \(2,\)\)"),
        ([[0, 1]], SHAPE_OF_POSITIONS + r"list \(int64, shape \(1, 2\)\)"),
        (None, SHAPE_OF_POSITIONS + r"NoneType \(object, shape \(\)\)"),
        (np.arange(101), "101 positions exceeds max_memory = 100"),
        (([0], ROW, ROW), "got 3 items"),
        (([0], ROW, ROW, np.zeros(2)), "synthetic keys and values"),
        (([0], ROW.T, ROW.T, np.zeros(1)), "synthetic keys and values"),
        (([0], *[np.zeros((33, SHAPE.head_dim))] * 2, np.zeros(33)), "33 synthetic"),
    ],
    ids=lambda value: None if isinstance(value, str) else "answer",
)
def test_answers_that_cannot_be_used_are_refused(answer: object, message: str) -> None:
    # A set of 101 positions needs a chunk that begins later.
    chunk_size = 4 * S if message.startswith("101") else S
    place = r"^select_memory of the rule in Python \(layer 0, KV head \d\): .*"
    with pytest.raises(UsageError, match=place + message):
        prefill_with(Selecting(answer), chunk_size)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[0], [1, 2]], "ValueError: .*inhomogeneous"),
        (([0], ROW, [["x"] * SHAPE.head_dim], np.zeros(1)), "ValueError: could not convert string"),
    ],
    ids=["ragged", "text"],
)
def test_what_numpy_refuses_is_the_cause(answer: object, message: str) -> None:
    with pytest.raises(UsageError, match=r"^select_memory .*: " + message) as caught:
        prefill_with(Selecting(answer))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("begin_prompt", ""),
        ("is_scored", r" \(layer 0, KV head 2\)"),
        ("observe_intra", r" \(layer 0, KV head 2\)"),
    ],
)
def test_an_exception_of_the_rule_is_the_cause(method: str, place: str) -> None:
    error = ZeroDivisionError("in the rule")
    message = f"^{method} of the rule in Python{place}: ZeroDivisionError: in the rule$"
    with pytest.raises(UsageError, match=message) as caught:
        prefill_with(Raising(method, error))
    assert caught.value.__cause__ is error


def test_an_interrupt_in_the_rule_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        prefill_with(Raising("is_scored", KeyboardInterrupt()))


def test_a_rule_without_select_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="a rule needs a method select_memory, which object lacks"):
        make_policy(object())


def test_a_rule_may_select_nothing() -> None:
    qkv = random_qkv(7, n_tokens=2 * S, **SHAPE.heads)
    q, k, v = qkv
    for column_sums in ("none", "part", "joint"):
        policy = make_policy(Selecting([]), column_sums=column_sums)
        attention = make_attention(policy, SHAPE, chunk_size=S, max_context=2 * S)
        output = prefill(attention, qkv, is_last=False)
        expected = causal_attention(q[:, S:], k[:, S:], v[:, S:])
        np.testing.assert_allclose(output[:, S:], expected, **CLOSE)


def test_unknown_column_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="column_sums = 'all'; it is one of none, part, joint"):
        make_policy(object(), column_sums="all")


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
