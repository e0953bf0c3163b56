"""Whole answers: their bytes are those of Starlette, and long ones leave the loop to others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from edgeh2o.engine.stats import GenerationStats
from edgeh2o.serving import openai_format, whole_answers
from edgeh2o.serving.answer_format import AnswerFormat, Chunk
from edgeh2o.serving.events import Finished, Piece, TokenRecord
from edgeh2o.serving.openai_format import ChatFormat, TextFormat
from edgeh2o.serving.segment import Segment
from edgeh2o.serving.whole_answers import MOST_IN_LOOP, encode_json, write_answers

TOP = tuple((f"{i}é\n".encode(), -1.5 - i) for i in range(9))
FINISHED = Finished("stop", cast("GenerationStats", None), "", "")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text('a"é', max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_json_is_that_of_starlette(value: Any) -> None:
    assert encode_json(value) == JSONResponse(value).body


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}, lambda x: [[[[[[[x]]]]]]]])
def test_no_number_is_refused(wrap: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json(wrap(float("nan")))


def pieces_of(n_tokens: int) -> list[Piece]:
    record = TokenRecord(b" w\xc3\xa9", -0.25, TOP, True, 5, tuple(range(len(TOP))))
    return [Piece((Segment("text", " w\xe9"),), record, 5) for _ in range(n_tokens)]


@pytest.fixture(autouse=True)
def _no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of these tests were never generated."""
    monkeypatch.setattr(openai_format, "timings", lambda stats: {})
    monkeypatch.setattr(openai_format.WholeObject, "add_usage", lambda *_: {"total_tokens": 3})


@pytest.mark.parametrize("kind", [ChatFormat, TextFormat])
def test_the_encoder_is_never_given_more_than_a_token(
    kind: type[AnswerFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the interpreter to itself, whatever thread it is in."""
    said = kind("m").whole(pieces_of(300), FINISHED)  # type: ignore[call-arg]
    expected, dumps, longest = JSONResponse(said).body, whole_answers._dumps, 0

    def noted(value: object) -> str:
        nonlocal longest
        text = dumps(value)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(whole_answers, "_dumps", noted)
    assert encode_json(said) == expected
    assert longest < 2000 < len(expected) / 10


class _Noted(ChatFormat):
    """Notes which thread makes it, and has the loop run meanwhile."""

    def __init__(self, others: threading.Event | None) -> None:
        super().__init__("m")
        self.thread = -1
        self._others = others

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        self.thread = threading.get_ident()
        if self._others is not None:
            assert self._others.wait(60)
        return super().whole(pieces, finished)


def test_others_are_served_while_a_long_answer_is_written() -> None:
    others = threading.Event()
    forms = [_Noted(others), _Noted(others)]
    told = [(pieces_of(MOST_IN_LOOP // 10), FINISHED), (pieces_of(1), FINISHED)]

    async def serve() -> bytes:
        writing = asyncio.ensure_future(write_answers(forms, told, list))
        await asyncio.sleep(0)
        others.set()
        return await writing

    written = json.loads(asyncio.run(serve()))
    counts = [len(each["choices"][0]["logprobs"]["content"]) for each in written]
    assert counts == [MOST_IN_LOOP // 10, 1]
    assert threading.get_ident() not in {form.thread for form in forms}


def test_short_answers_are_written_at_once() -> None:
    form = _Noted(None)
    long_text = [Piece((Segment("text", "a"),))] * (2 * MOST_IN_LOOP)
    for pieces in (pieces_of(MOST_IN_LOOP // 10 - 1), long_text):
        asyncio.run(write_answers([form], [(pieces, FINISHED)], list))
        assert form.thread == threading.get_ident()


def test_a_request_that_is_given_up_waits_for_nothing() -> None:
    """What is being written is of no use any more."""
    others, begun = threading.Event(), threading.Event()

    class Begun(_Noted):
        def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
            begun.set()
            return super().whole(pieces, finished)

    async def give_up() -> None:
        told = [(pieces_of(MOST_IN_LOOP), FINISHED)]
        writing = asyncio.ensure_future(write_answers([Begun(others)], told, list))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        others.set()

    asyncio.run(give_up())
