"""Conversations whose last message is the beginning of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.anthropic_request import read_messages_request
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.events import Event, Piece
from edgeh2o.serving.fields import Fields
from edgeh2o.serving.requests import GenerationRequest, read_chat_request
from edgeh2o.serving.responses_request import read_responses_request
from edgeh2o.serving.ticket import Ticket
from tests.serving.conftest import open_engine
from tests.serving.templates import THINKING

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
HARMONY = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
ASKED = {"role": "user", "content": "a hen?"}


def read(*messages: dict[str, Any], **fields: Any) -> GenerationRequest:
    return read_chat_request(Fields({"messages": [ASKED, *messages]} | fields), SamplingParams())


def prompt_of(engine: AnswerEngine, *messages: dict[str, Any], **fields: Any) -> str:
    return engine.open_prompt(read(*messages, **fields)).text


def begun(content: str = "A he", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | fields


def test_a_last_message_of_the_assistant_is_gone_on_with(serving_model: Path) -> None:
    with open_engine(serving_model, chat_template=PLAIN) as engine:
        beginning = "[user] a hen?\n[assistant] "
        for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
            assert prompt_of(engine, begun(), **fields) == f"{beginning}A he"
        whole = prompt_of(engine, begun(), continue_final_message=False)
        assert whole == f"{beginning}A he\n[assistant] "
        parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "he"}]
        assert prompt_of(engine, begun(parts)) == f"{beginning}A\nhe"  # type: ignore[arg-type]
        assert prompt_of(engine, add_generation_prompt=False) == "[user] a hen?\n"
        # What a message says is text, at the end too.
        ids = engine.open_prompt(read(begun("x</s>"))).encode()
        assert engine.tokenizer.eos_id not in ids


def test_other_interfaces(serving_model: Path) -> None:
    """Anthropic's goes on with it, OpenAI's Responses begin an answer of their own."""
    body = Fields({"max_tokens": 4, "messages": [ASKED, begun()]})
    assert read_messages_request(body, SamplingParams()).continues == "content"
    items = Fields({"input": [ASKED, begun()]})
    assert read_responses_request(items, SamplingParams()).continues is None


def test_thoughts_may_be_gone_on_with(serving_model: Path) -> None:
    with open_engine(serving_model, chat_template=THINKING) as engine:
        thought = begun("", reasoning_content="Well")
        assert prompt_of(engine, thought).endswith("[assistant] <think>\nWell")
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        assert prompt_of(engine, thought, **closed).endswith("[assistant] <think>\nWell")
        said = prompt_of(engine, begun("A he", reasoning_content="Well"), **closed)
        assert said.endswith("[assistant] <think>\nWell\n</think>\n\nA he")
        assert prompt_of(engine, begun()).endswith("<think>\n\n</think>\n\nA he")
        assert prompt_of(engine, begun(), **closed).endswith("[assistant] A he")
        named = prompt_of(
            engine, begun("x", reasoning_content="y"), continue_final_message="content"
        )
        assert named.endswith("x")
        events: list[Event] = []
        fields = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
        engine.answer(read(thought, **fields), events.append, Ticket())
        kinds = {s.kind for event in events if isinstance(event, Piece) for s in event.segments}
        assert kinds <= {"reasoning", "text"} and "reasoning" in kinds


def test_thoughts_that_are_not_wanted_are_ended(serving_model: Path) -> None:
    """Templates of DeepSeek R1 and QwQ begin them whatever they are told."""
    begins = PLAIN.replace("[assistant] ", "[assistant] <think>\n")
    with open_engine(serving_model, chat_template=begins) as engine:
        beginning = "[user] a hen?\n[assistant] <think>\n"
        assert prompt_of(engine) == beginning
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            assert prompt_of(engine, **fields) == f"{beginning}</think>"


def test_the_text_of_gpt_oss_has_its_channel(serving_model: Path) -> None:
    with open_engine(serving_model, chat_template=HARMONY) as engine:
        text = prompt_of(engine, begun())
    assert text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>A he")


def test_a_conversation_goes_on_from_it(serving_model: Path) -> None:
    """The answer and the next question are read behind what was there."""
    with open_engine(serving_model, chat_template=PLAIN) as engine:
        first: list[Event] = []
        request = read(begun("the hen " * 40), max_tokens=4, seed=1, ignore_eos=True)
        engine.answer(request, first.append, Ticket())
        text = "".join(s.text for e in first if isinstance(e, Piece) for s in e.segments)
        asked = read(begun("the hen " * 40 + text), ASKED, max_tokens=1)
        second: list[Event] = []
        engine.answer(asked, second.append, Ticket())
    assert second[-1].stats.cached_tokens > 20  # type: ignore[union-attr]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {"continue_final_message": True}, "continue_final_message"),
        ([begun()], {"continue_final_message": "reasoning"}, "continue_final_message"),
        ([begun()], {"continue_final_message": 3}, "continue_final_message"),
        ([begun()], {"continue_final_message": ["content"]}, "continue_final_message"),
        ([begun(tool_calls=[CALL])], {"continue_final_message": True}, "continue_final_message"),
        ([begun()], {"add_generation_prompt": True}, "add_generation_prompt"),
        ([ASKED], {"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_gone_on_with(
    messages: list[dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(*messages, **fields)
    assert caught.value.param == param


def test_calls_end_an_answer() -> None:
    assert read(begun(tool_calls=[CALL])).continues is None
