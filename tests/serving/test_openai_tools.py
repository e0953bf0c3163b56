"""openai-python offers tools: calls that are required, cut off, allowed or refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serving.chats import MESSAGES, TOOLS
from tests.serving.conftest import RunningServer
from tests.serving.fetching import fetch


def test_some_of_the_tools_may_be_called(client: openai.OpenAI, server: RunningServer) -> None:
    """All of them stand in the prompt, which is then read once for every choice."""
    tools: Any = [
        {"type": "function", "function": TOOLS[0]["function"] | {"name": name}}
        for name in ("add", "take", "give")
    ]
    counts = set()
    for mode, names in (("required", ["take"]), ("required", ["give", "take"]), ("auto", ["add"])):
        allowed = {
            "mode": mode,
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        }
        options: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 60, "tools": tools}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        whole = client.chat.completions.create(**options, tool_choice=choice, seed=1)
        assert whole.usage is not None
        counts.add(whole.usage.prompt_tokens)
        calls = whole.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= set(names)  # type: ignore[union-attr]
        assert calls or mode == "auto"
        flat: Any = [tool["function"] | {"type": "function"} for tool in tools]
        named: Any = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        answer = client.responses.create(
            model="any", input="the hen", tools=flat, tool_choice=choice
        )
        assert {item.name for item in answer.output if item.type == "function_call"} <= set(names)
        assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    assert len(counts) == 1
    for wrong in (
        {"mode": "required", "tools": []},
        {"mode": "required", "tools": [{"type": "function", "function": {"name": "none"}}]},
        {"mode": "required", "tools": [{"type": "function"}]},
        {"mode": "any", "tools": [{"type": "function", "function": {"name": "add"}}]},
        {},
    ):
        body = {"messages": MESSAGES, "tools": tools}
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": wrong}
        data = json.dumps(body).encode()
        reply = fetch(server, "/v1/chat/completions", data, {"content-type": "application/json"})
        assert reply.status_code == 400 and "tool_choice" in reply.json()["error"]["param"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_is_one(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    made = client.chat.completions.create(**options, seed=1, max_tokens=400)
    (call,) = made.choices[0].message.tool_calls or []
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("tool_calls", None)
    assert call.type == "function" and call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments["a"] in (1, 2, 3) and arguments["b"] in (4, 5)
    parts = [
        chunk.choices[0].delta.tool_calls[0]
        for chunk in client.chat.completions.create(**options, seed=1, max_tokens=400, stream=True)
        if chunk.choices[0].delta.tool_calls
    ]
    assert parts[0].id and parts[0].function and parts[0].function.name == "add"
    streamed = "".join(part.function.arguments or "" for part in parts if part.function)
    assert json.loads(streamed) == arguments
    # The conversation goes on with the call and its result.
    messages = [
        *MESSAGES,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "6"},
    ]
    after = client.chat.completions.create(
        model="m",
        messages=messages,
        tools=TOOLS,
        max_tokens=4,  # type: ignore[arg-type]
    )
    assert after.usage and after.usage.prompt_tokens > made.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_required_call_leaves_a_form_nothing_to_shape(client: openai.OpenAI) -> None:
    """It was refused; clients send both."""
    made = client.chat.completions.create(
        model="m",
        messages=MESSAGES,  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice="required",
        response_format={"type": "json_object"},
        seed=1,
        max_tokens=400,
    )
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.tool_calls and made.choices[0].message.content is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_that_is_cut_is_a_call_by_length(
    client: openai.OpenAI, choice: Any
) -> None:
    """With the beginning of its arguments, as that of OpenAI; it came back as the text."""
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    whole = client.chat.completions.create(**options, seed=1, max_tokens=400)
    (complete,) = whole.choices[0].message.tool_calls or []
    assert complete.type == "function" and whole.usage
    for n in range(1, whole.usage.completion_tokens - 1, 7):
        made = client.chat.completions.create(**options, seed=1, max_tokens=n)
        assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("length", None)
        (call,) = made.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "add"
        begun = "".join(call.function.arguments.split())
        assert "".join(complete.function.arguments.split()).startswith(begun)
        parts = [
            part.function.arguments or ""
            for chunk in client.chat.completions.create(
                **options, seed=1, max_tokens=n, stream=True
            )
            for part in chunk.choices[0].delta.tool_calls or []
            if part.function
        ]
        assert "".join(parts) == call.function.arguments
    # A conversation that has it goes on.
    messages = [
        *MESSAGES,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "it was cut"},
    ]
    after = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=2)
    assert after.usage and after.usage.completion_tokens == 2


def test_a_required_call_that_a_stop_text_ends_is_no_text(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    made = client.chat.completions.create(**options, seed=1, max_tokens=400, stop=['"b"'])
    (call,) = made.choices[0].message.tool_calls or []
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("stop", None)
    assert call.type == "function" and call.function.arguments.startswith("{")


def test_what_cannot_be_enforced_is_ignored_unless_strict(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"enum": [1]}},
            "secret": {"type": "string", "format": "password", "maxLength": 2},
        },
        "required": ["tags"],
    }
    for is_strict in (False, True):
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        named = {"name": "f", "schema": parameters, "strict": is_strict}
        call: Any = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        form: Any = {"response_format": {"type": "json_schema", "json_schema": named}}
        for options in (call, form):
            if is_strict:
                with pytest.raises(openai.BadRequestError, match="uniqueItems"):
                    client.chat.completions.create(model="m", messages=MESSAGES, **options)
            else:
                client.chat.completions.create(
                    model="m", messages=MESSAGES, max_tokens=4, **options
                )
    bare = {"json_schema": parameters}
    client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4, extra_body=bare)
