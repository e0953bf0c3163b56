"""Models whose chat template begins the reasoning, as that of Qwen 3.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.events import Event, Piece
from edgeh2o.serving.fields import Fields
from edgeh2o.serving.requests import read_chat_request
from edgeh2o.serving.ticket import Ticket
from tests.serving.conftest import open_engine

BEGINS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}<think>\n"


def segments_of(engine: AnswerEngine, **fields: Any) -> list[tuple[str, str]]:
    """Kinds and texts of an answer, those that follow each other joined."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1} | fields
    request = read_chat_request(Fields(body), SamplingParams(temperature=1.5, ignore_eos=True))
    events: list[Event] = []
    engine.answer(request, events.append, Ticket())
    found: list[tuple[str, str]] = []
    for event in events:
        for segment in event.segments if isinstance(event, Piece) else ():
            text = segment.text
            if found and found[-1][0] == segment.kind:
                text = found.pop()[1] + text
            found.append((segment.kind, text))
    return found


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}},
        {"response_format": {"type": "regex", "regex": '"yes"'}},
        {"grammar": 'root ::= "\\"yes\\""'},
    ],
)
def test_an_answer_of_a_form_is_no_reasoning(serving_model: Path, form: dict[str, Any]) -> None:
    """It was all ``reasoning_content``, and the content was empty."""
    with open_engine(serving_model, chat_template=BEGINS) as engine:
        assert segments_of(engine, **form) == [("text", '"yes"')]


def test_other_answers_begin_with_it(serving_model: Path) -> None:
    with open_engine(serving_model, chat_template=BEGINS) as engine:
        assert [kind for kind, _ in segments_of(engine)] == ["reasoning"]
        grammar = 'root ::= "well" "</think>" "\\n" "yes"'
        assert segments_of(engine, grammar=grammar) == [("reasoning", "well"), ("text", "yes")]
