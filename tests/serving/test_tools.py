"""What a model reads of tools, by a template that knows nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.errors import FormatError
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.fields import parse_body
from edgeh2o.serving.requests import read_chat_request
from tests.serving.conftest import open_engine

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
# As Gemma 2 has it, and as Mistral 7B Instruct 0.1.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + PLAIN
)
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds two numbers"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATION = [
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "it is three", "tool_call_id": "1"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "sure?"},
]


def prompt_of(engine: AnswerEngine, **body: Any) -> str:
    fields = parse_body(json.dumps({"messages": CONVERSATION} | body).encode())
    prompt = engine.open_prompt(read_chat_request(fields, SamplingParams()))
    assert prompt.transcript is not None
    return prompt.transcript.prompt


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}])
def test_earlier_calls_are_read_whether_or_not_there_may_be_more(
    serving_model: Path, body: dict[str, Any]
) -> None:
    with open_engine(serving_model, chat_template=PLAIN) as engine:
        text = prompt_of(engine, **body)
    assert '[assistant] <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "[user] <tool_response>\nit is three\n</tool_response>" in text
    assert ("adds two numbers" in text) == (body == {"tools": TOOLS})


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT])
def test_tools_are_told_to_templates_without_a_system_role(
    serving_model: Path, template: str
) -> None:
    with open_engine(serving_model, chat_template=template) as engine:
        text = prompt_of(engine, tools=TOOLS)
        alone = [{"role": "assistant", "content": "hello"}]
        unasked = prompt_of(engine, tools=TOOLS, messages=alone)
    assert text.startswith("[user] You may call functions")
    assert text.count("adds two numbers") == 1
    assert "</tool_call>\n\nwhat is it?\n[assistant]" in text
    assert unasked.startswith("[user] You may call functions") and "[assistant] hello" in unasked


def test_a_system_message_that_the_template_refuses_is_still_refused(serving_model: Path) -> None:
    messages = [{"role": "system", "content": "be kind"}, *CONVERSATION]
    with (
        open_engine(serving_model, chat_template=NO_SYSTEM) as engine,
        pytest.raises(FormatError, match="System role not supported"),
    ):
        prompt_of(engine, tools=TOOLS, messages=messages)
