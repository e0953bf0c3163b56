"""Answers in the form of OpenAI's interface."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.serving.events import Piece, TokenRecord
from edgeh2o.serving.openai_format import TextFormat

HEN = "\N{CHICKEN}".encode()


def logprobs_of(records: Sequence[TokenRecord]) -> dict[str, Any]:
    """What the chunks of a stream say together."""
    form, joined = TextFormat("m"), {}
    for record in records:
        for chunk in form.pieces(Piece((), record)):
            for name, values in chunk["choices"][0]["logprobs"].items():
                joined.setdefault(name, []).extend(values)
    return joined


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    parts = (b"a", HEN[:2], HEN[2:3], HEN[3:] + b"!", b"b")
    top = ((HEN[:2], -1.0), (HEN[:3], -2.0), (b"a", -3.0))
    said = logprobs_of([TokenRecord(part, -1.0, top, top_ids=(7, 8, 9)) for part in parts])
    # As OpenAI's own: a backslash, not the byte.
    assert said["tokens"] == ["a", r"bytes:\xf0\x9f", r"bytes:\x90", r"bytes:\x94\x21", "b"]
    assert said["text_offset"] == [0, 1, 1, 1, 3]
    assert said["top_logprobs"][0] == {r"bytes:\xf0\x9f": -1, r"bytes:\xf0\x9f\x90": -2, "a": -3}


def test_control_tokens_are_no_part_of_the_text() -> None:
    records = [TokenRecord(data, -1.0, (), data != b"</s>") for data in (b"ab", b"</s>", b"c")]
    assert logprobs_of(records)["text_offset"] == [0, 2, 2]


@given(text=st.text(max_size=12), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_offsets_are_indices_into_the_text(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    said = logprobs_of([TokenRecord(part, -1.0, ()) for part in parts])
    for begin, part, token, offset in zip(
        edges[:-1], parts, said["tokens"], said["text_offset"], strict=True
    ):
        assert offset == len(data[:begin].decode(errors="ignore"))
        if not token.startswith("bytes:"):
            assert token.encode() == part and text.startswith(token, offset)
