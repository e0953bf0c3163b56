"""Arguments of calls that come in pieces: those of the whole answer, for every cut of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.serving.segments import AnswerParser
from tests.serving.parsing import SCHEMAS, parse_answer

# Blanks, escapes, ends of calls and control tokens within a text, as a model may write them.
ARGUMENTS = '{"a":1 , "text": "</tool_call> ``` \\u00e9\\n{", "more": [{}, -1.5e3, null]}'
CALL = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"type": "function", "name": "add", "parameters": {ARGUMENTS}}}'
WITH_ID = f'{{"name": "add", "arguments": {ARGUMENTS}, "id": "a]}}"}}'
SWAPPED = f'{{"arguments": {ARGUMENTS}, "name": "add"}}'
CHANNEL = "<|channel|>commentary to=functions.add<|message|>"
# The answers, and how many calls of these arguments are in them.
ANSWERS = {
    CALL: 1,
    LLAMA: 1,
    f"[{CALL}, {WITH_ID}]": 2,
    f"[{WITH_ID},{WITH_ID},]\nDone.": 2,
    f"<think>hm</think>see\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{LLAMA}</tool_call>": 2,
    f"<tool_call>{CALL}\n{CALL}</tool_call> and": 2,
    f"<tool_call>[{CALL}, {CALL}]</tool_call>": 2,
    f"```json\n{CALL}\n```\nDone.": 1,
    f"```\n[{CALL}, {CALL}]\n```": 2,
    f"add{ARGUMENTS}add {ARGUMENTS} so": 2,
    f"{CHANNEL}{ARGUMENTS}\n<|end|><|start|>assistant{CHANNEL} {ARGUMENTS}": 2,
}


@pytest.mark.parametrize("answer", ANSWERS)
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_pieces_make_the_arguments_of_the_whole(answer: str, cuts: list[int]) -> None:
    found = parse_answer(answer, cuts)
    assert found == parse_answer(answer)
    calls = [segment for segment in found if segment.call is not None]
    assert [segment.call.arguments for segment in calls if segment.call] == (
        [ARGUMENTS] * ANSWERS[answer]
    )
    assert not any(segment.is_cut or segment.is_open for segment in calls)


@pytest.mark.parametrize("answer", ANSWERS)
def test_they_come_as_they_are_written(answer: str) -> None:
    """At most a number, an escape or what may end a message is held back."""
    parser, begun, begin = AnswerParser(SCHEMAS), "", answer.index('{"a":1')
    for place, character in enumerate(answer[: begin + len(ARGUMENTS)]):
        begun += "".join(s.call.arguments for s in parser.push(character) if s.call)
        if place >= begin:
            assert len(begun) >= place + 1 - begin - 6
    assert begun == ARGUMENTS


@pytest.mark.parametrize("answer", ANSWERS)
@settings(max_examples=30)
@given(place=st.integers(0, 300), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_an_answer_that_is_cut_has_the_beginning(answer: str, place: int, cuts: list[int]) -> None:
    for is_cut in (True, False):
        found = parse_answer(answer[:place], cuts, is_cut=is_cut)
        assert found == parse_answer(answer[:place], is_cut=is_cut)
        calls = [segment.call for segment in found if segment.call is not None]
        # A message of gpt-oss that ends without any is a call without arguments.
        begun = [call.arguments for call in calls if is_cut or call.arguments != "{}"]
        assert all(map(ARGUMENTS.startswith, begun))
        assert not any(segment.is_open for segment in found)


# What the call has, and what is text.
BROKEN = {
    '{"name": "add", "arguments": {"a": NaN}}': ('{"a": ', "NaN}}"),
    '<tool_call>{"name": "add", "arguments": {"a": b}}</tool_call>.': (
        '{"a": ',
        "b}}</tool_call>.",
    ),
    '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>.': ('{"a": 1,', "."),
    "add{'a': 1} and": ("{", "'a': 1} and"),
    f'{CHANNEL}{{"a": 1, b}}<|end|>': ('{"a": 1, ', "b}"),
    f'{CHANNEL}{{"a": 1<|end|>': ('{"a": ', ""),
    '<tool_call>{"name": "add", "arguments": {"a": 1': ('{"a": ', ""),
}


@pytest.mark.parametrize("answer", BROKEN)
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 80), max_size=4))
def test_one_that_breaks_ends_there_and_the_rest_is_text(answer: str, cuts: list[int]) -> None:
    call, *texts = parse_answer(answer, cuts)
    assert call.call is not None and call.is_cut
    assert (call.call.arguments, "".join(s.text for s in texts)) == BROKEN[answer]


@pytest.mark.parametrize("end", ["", "}", "}}}", ', "id": 1', "\n"])
def test_complete_arguments_are_a_call_however_its_object_ends(end: str) -> None:
    """They were text with its tags; small models lose count of braces."""
    begin = '{"name": "add", "arguments": {"a": 1}'
    for answer in (f"<tool_call>{begin}{end}</tool_call>", f"<tool_call>{begin}{end}"):
        (found,) = parse_answer(answer)
        assert found.call is not None and not found.is_cut
        assert json.loads(found.call.arguments) == {"a": 1}


def test_line_ends_within_a_text_are_taken() -> None:
    """They were text with its tags, in whole answers too."""
    for call in (CALL, SWAPPED):
        (found,) = parse_answer(call.replace("\\n", "\n"))
        assert found.call is not None and not found.is_cut
        assert json.loads(found.call.arguments) == json.loads(ARGUMENTS)
