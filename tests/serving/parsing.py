"""Answers cut into pieces and parsed, for tests of every way in which models write calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from edgeh2o.serving.segment import Segment, join_calls
from edgeh2o.serving.segments import AnswerParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "text": {"type": "string"},
            "flag": {"type": ["boolean", "null"]},
            "more": {"anyOf": [{"type": "object"}, {"type": "array"}]},
            "name": {"type": ["string", "null"]},
            "unit": {"enum": ["1", "2"]},
        }
    }
}


def cut(answer: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(answer)) for place in cuts), len(answer)]
    return [answer[a:b] for a, b in itertools.pairwise(edges)]


def join_segments(segments: Iterable[Segment]) -> list[Segment]:
    """As they are if nothing comes in pieces."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and segment.kind == joined[-1].kind != "call":
            joined.append(Segment(segment.kind, joined.pop().text + segment.text))
        elif segment.goes_on:
            assert joined[-1].is_open
            (call,) = join_calls([joined.pop(), segment])
            is_cut, is_open = segment.is_cut, segment.is_open
            joined.append(Segment("call", call=call, is_cut=is_cut, is_open=is_open))
        else:
            joined.append(segment)
    return joined


def parse_answer(
    answer: str, cuts: Iterable[int] = (), *, is_cut: bool = False, **options: Any
) -> list[Segment]:
    """The segments of an answer that comes in pieces, joined."""
    parser = AnswerParser(SCHEMAS, **options)
    found = [segment for piece in cut(answer, cuts) for segment in parser.push(piece)]
    return join_segments([*found, *parser.finish(is_cut=is_cut)])


def segments_of(answer: str, cuts: list[int], **options: Any) -> list[tuple[str, str]]:
    found = parse_answer(answer, cuts, **options)
    return [(s.kind, s.call.name if s.call else s.text) for s in found]
