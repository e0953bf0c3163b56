"""Answers of gpt-oss: reasoning, text and calls by the headers of its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.serving.segment import Segment
from edgeh2o.serving.tools import ToolCall

from .parsing import parse_answer, segments_of

THOUGHT = "<|channel|>analysis<|message|>hm <b><|end|>"
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ANSWERS = {
    f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>yes\n": [
        ("reasoning", "hm <b>"),
        ("text", "yes\n"),
    ],
    "<|channel|>final<|message|>a <|st b <|en": [("text", "a <|st b <|en")],
    "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b": [
        ("reasoning", "a"),
        ("text", "b"),
    ],
    f'{THOUGHT}<|start|>assistant{TO_ADD}{{"a": 1}}': [("reasoning", "hm <b>"), ("call", "add")],
    f'{TO_ADD}{{"a": 1}}<|start|>assistant{TO_ADD}{{}}': [("call", "add"), ("call", "add")],
    # The recipient beside the role, as the template writes it, and no arguments.
    f"{THOUGHT}<|start|>assistant to=functions.add<|channel|>commentary json<|message|>": [
        ("reasoning", "hm <b>"),
        ("call", "add"),
    ],
    "<|channel|>commentary<|message|>First I add.": [("text", "First I add.")],
    "<|channel|>commentary to=browser.open<|message|>{}": [("text", "{}")],
    f"{TO_ADD}none": [("text", "none")],
    "<|channel|>analysis": [],
    "<|chan": [("text", "<|chan")],
}


@pytest.mark.parametrize("answer", ANSWERS)
@given(cuts=st.lists(st.integers(0, 130), max_size=8))
def test_pieces_do_not_matter(answer: str, cuts: list[int]) -> None:
    assert segments_of(answer, cuts) == ANSWERS[answer]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1', Segment("call", call=ToolCall("add", '{"a": '), is_cut=True)),
        ('{"a": 1}', Segment("call", call=ToolCall("add", '{"a": 1}'))),
        ("", Segment("call", call=ToolCall("add", ""), is_cut=True)),
    ],
)
def test_a_call_that_is_cut_is_a_call(text: str, found: Segment) -> None:
    assert parse_answer(TO_ADD + text, [len(TO_ADD)], is_cut=True) == [found]


def test_raw_text_stays_as_it_is() -> None:
    assert segments_of(THOUGHT, [4], is_plain=True) == [("text", THOUGHT)]
