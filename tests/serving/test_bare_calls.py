"""Calls whose marks are control tokens: as Python has them, and as a name and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.serving.bare_calls import parse_bare_calls
from edgeh2o.serving.segments import AnswerParser

from .parsing import segments_of

NAMES = ("add", "web.search")
PARSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "[add(a=1)]": ([{"a": 1}], ""),
    "[add()]Adding now.": ([{}], "Adding now."),
    '[add(a=-1.5e3, b=\'it\\\'s\', c="x \\"y\\" \\n"), add(a=None)]': (
        [{"a": -1500.0, "b": "it's", "c": 'x "y" \n'}, {"a": None}],
        "",
    ),
    "[ add( a = [1, {'k': True, \"n\": null}] , ) ]": ([{"a": [1, {"k": True, "n": None}]}], ""),
    "[web.search(q='say \"hi\"\\\\ to\nZ\u00fcrich')]": (
        [{"q": 'say "hi"\\ to\nZ\u00fcrich'}],
        "",
    ),
    'add{"a": 1}': ([{"a": 1}], ""),
    'add{"a": 1}add {"a": 2} done': ([{"a": 1}, {"a": 2}], "done"),
}


@pytest.mark.parametrize("text", PARSED)
def test_they_are_calls(text: str) -> None:
    expected, rest = PARSED[text]
    found = parse_bare_calls(text, NAMES)
    assert found is not None
    assert [json.loads(call.arguments) for call in found[0]] == expected
    assert found[1] == rest


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1, 2]",
        "[rm(a=1)]",
        "[add(1)]",
        "[add(a=1)",
        "[add(a=b)]",
        "[add(a=1e999)]",
        "[add(a=NaN)]",
        "[add(a=" + "[" * 5000 + "1)]",
        "[add(a='\\x41')]",
        "add",
        'add{"a": ',
        'add{"a": NaN}',
        'rm{"a": 1}',
        "see add{}",
    ],
)
def test_others_are_not(text: str) -> None:
    assert parse_bare_calls(text, NAMES) is None


ANSWERS = {
    "[add(a=1)] and so": [("call", "add"), ("text", "and so")],
    "[1, 2]": [("text", "[1, 2]")],
    'add{"a": 1}': [("call", "add")],
    "<think>x</think>[add(a=1)]": [("reasoning", "x"), ("text", "[add(a=1)]")],
    "adding it up": [("text", "adding it up")],
    "add": [("text", "add")],
}


@pytest.mark.parametrize("answer", ANSWERS)
@given(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_pieces_do_not_matter(answer: str, cuts: list[int]) -> None:
    assert segments_of(answer, cuts) == ANSWERS[answer]


def test_half_characters_are_replaced() -> None:
    found = parse_bare_calls('[add(a="\\ud83d")]', NAMES)
    assert found is not None and json.loads(found[0][0].arguments) == {
        "a": "\N{REPLACEMENT CHARACTER}"
    }


def test_text_is_not_held_back_where_there_are_no_tools() -> None:
    assert [segment.text for segment in AnswerParser().push("[add(")] == ["[add("]
