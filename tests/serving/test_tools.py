"""What a model reads of tools, by a template that knows nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.errors import FormatError
from edgeh2o.export.gguf import quantize_model
from edgeh2o.export.onnx import export_model
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.fields import parse_body
from edgeh2o.serving.requests import read_chat_request
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory
from tests.transformers.folders import write_folder

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
        whole = {"messages": alone, "continue_final_message": False}
        unasked = prompt_of(engine, tools=TOOLS, **whole)
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


def test_a_request_with_tools_goes_to_the_template_of_that_name(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """In a folder, in the GGUF file that is written of it, and in the ONNX export of that."""
    folder = write_folder(tiny_model(), tmp_path / "folder")
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    templates = {"default": PLAIN, "tool_use": "{{ tools | map(attribute='type') | list }}" + PLAIN}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    file, exported = tmp_path / "m.gguf", tmp_path / "onnx"
    quantize_model(folder, file, "f32")
    export_model(file, exported)
    for model in (folder, file, exported):
        with open_engine(model) as engine:
            text = prompt_of(engine, tools=TOOLS)
            assert text.startswith("['function'][user] what is it?")
            for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
                assert prompt_of(engine, **body).startswith("[user] what is it?")
    with LLM(file, chat_template_kwargs={"tools": TOOLS}) as llm:
        prompt = llm._session.prompts.open_chat(CONVERSATION[:1])
        assert prompt.transcript is not None
        assert prompt.transcript.prompt.startswith("['function'][user] what is it?")
    with open_engine(file, chat_template=PLAIN) as engine:  # the user's replaces both
        assert "adds two numbers" in prompt_of(engine, tools=TOOLS)
