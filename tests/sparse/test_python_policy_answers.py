"""Answers of a rule in Python that cannot be used, exceptions in it, and an empty memory."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o.errors import UsageError
from tests.ops.attention_case import make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv
from tests.sparse.python_rules import CLOSE, SHAPE, S, make_policy

pytestmark = pytest.mark.usefixtures("isa")


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
