"""Answers cut into pieces and parsed, for tests of every way in which models write calls."""

from __future__ import annotations

import itertools
from typing import Any

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


def segments_of(answer: str, cuts: list[int], **options: Any) -> list[tuple[str, str]]:
    parser = AnswerParser(SCHEMAS, **options)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    found = [s for a, b in itertools.pairwise(edges) for s in parser.push(answer[a:b])]
    joined: list[tuple[str, str]] = []
    for segment in [*found, *parser.finish()]:
        value = segment.call.name if segment.call else segment.text
        if joined and segment.kind == joined[-1][0] != "call":
            value = joined.pop()[1] + value
        joined.append((segment.kind, value))
    return joined
