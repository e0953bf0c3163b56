"""JSON that comes in pieces: the same text for every cut, and nothing that is no JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.serving.json_text import MAX_DEPTH, JsonText
from tests.serving.parsing import cut

CUTS = st.lists(st.integers(0, 80), max_size=8)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


def read(text: str, cuts: list[int]) -> tuple[JsonText, str]:
    reader = JsonText()
    return reader, "".join(reader.push(piece) for piece in cut(text, cuts))


@given(OBJECTS, CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_objects_come_as_they_were_written(
    value: dict[str, Any], cuts: list[int], is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    reader, given_text = read(f"{text} and more", cuts)
    assert given_text == text and reader.is_done
    assert reader.rest == " and more"


@given(st.text('{}[]":,\\u0dD8 c1-.etrunlfase\n', max_size=24), CUTS)
def test_whatever_is_written_what_is_given_may_be_json(body: str, cuts: list[int]) -> None:
    text = f'{{"a": {body}'
    reader, given_text = read(text, cuts)
    whole, given_whole = read(text, [])
    assert (given_text, reader.is_done, reader.is_broken) == (
        given_whole,
        whole.is_done,
        whole.is_broken,
    )
    assert reader.rest == whole.rest
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        assert not reader.is_done
    else:
        if reader.is_done:  # a number that is none in JSON breaks it
            assert text[end:] == reader.rest
            json.loads(given_text)
        else:
            assert reader.is_broken


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "\\ud83d\\ude00"}', '{"a": "\\ud83d\\ude00"}'),
        ('{"a": "\\ud83d"}', '{"a": "\ufffd"}'),
        ('{"a": "\\ud83d\\ud83d\\ude00\\ude00x"}', '{"a": "\ufffd\\ud83d\\ude00\ufffdx"}'),
        ('{"a": "\\\\ud83d"}', '{"a": "\\\\ud83d"}'),
        ('{"a": "x\n\ty"}', '{"a": "x\\n\\ty"}'),
    ],
)
@given(cuts=CUTS)
def test_what_not_all_readers_take_is_replaced(text: str, expected: str, cuts: list[int]) -> None:
    reader, found = read(text, cuts)
    assert found == expected and reader.is_done
    found.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ('{"a": NaN}', '{"a": '),
        ('{"a": 1e999}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": 1,}', '{"a": 1,'),
        ("{'a': 1}", "{"),
        ('{"a" 1}', '{"a" '),
        ('{"a": [1}', '{"a": [1'),
        ('{"a": "\\x"}', '{"a": "'),
        ('{"a": "\\ud83d\\ux"}', '{"a": "\ufffd'),
        ("[1]", ""),
        ('{"a": ' + "[" * MAX_DEPTH, '{"a": ' + "[" * (MAX_DEPTH - 1)),
    ],
)
def test_it_ends_where_it_is_json_no_more(text: str, certain: str) -> None:
    reader, found = read(text, [])
    assert found == certain and reader.is_broken
    assert reader.push("}") == ""
