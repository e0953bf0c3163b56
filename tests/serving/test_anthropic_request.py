"""Bodies of Anthropic's Messages API: they are the requests that chats are, or refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.anthropic_request import read_messages_request
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.fields import parse_body
from edgeh2o.serving.requests import GenerationRequest, read_chat_request

SAY = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "adds", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": SCHEMA},
}
CACHED = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(**body: Any) -> GenerationRequest:
    whole = {"messages": [SAY], "max_tokens": 5} | body
    return read_messages_request(parse_body(json.dumps(whole).encode()), SamplingParams())


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {}),
        (
            {"stop_sequences": ["a"], "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1},
            {"stop": ["a"], "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1},
        ),
        (
            {"stream": True, "metadata": {"user_id": "x"}, "service_tier": "auto", "top_k": None},
            {"stream": True},
        ),
        (
            {"system": "be kind"},
            {"messages": [{"role": "system", "content": "be kind"}, SAY]},
        ),
        (
            {
                "system": [
                    text("x-anthropic-billing-header: cc_version=2; cch=1f2e3;"),
                    text("be kind", **CACHED),
                    text("and short"),
                ]
            },
            {"messages": [{"role": "system", "content": "be kind\nand short"}, SAY]},
        ),
        (
            {"messages": [{"role": "user", "content": [text("a", **CACHED), text("b")]}]},
            {"messages": [{"role": "user", "content": [text("a"), text("b")]}]},
        ),
        (
            {
                "messages": [
                    SAY,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "thinking", "thinking": "hm", "signature": ""},
                            text("well"),
                            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": "2", **CACHED},
                            {"type": "tool_result", "tool_use_id": "c2", "content": [text("3")]},
                            {"type": "tool_result", "tool_use_id": "c3", "is_error": True},
                            text("go on"),
                        ],
                    },
                ]
            },
            {
                "messages": [
                    SAY,
                    {
                        "role": "assistant",
                        "content": "well",
                        "reasoning_content": "hm",
                        "tool_calls": [CALL],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    {"role": "tool", "tool_call_id": "c2", "content": "3"},
                    {"role": "tool", "tool_call_id": "c3", "content": ""},
                    {"role": "user", "content": "go on"},
                ]
            },
        ),
        ({"tools": [TOOL | CACHED]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL | {"type": "custom"}], "tool_choice": {"type": "auto"}},
            {"tools": [CHAT_TOOL], "tool_choice": "auto"},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            {"tools": [CHAT_TOOL], "tool_choice": "none"},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
            },
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            {"tools": [CHAT_TOOL], "parallel_tool_calls": False},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {
                "output_config": {
                    "effort": "low",
                    "format": {"type": "json_schema", "schema": SCHEMA},
                }
            },
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
    ],
)
def test_a_body_is_the_request_of_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    whole = {"messages": [SAY], "max_tokens": 5} | chat
    expected = read_chat_request(parse_body(json.dumps(whole).encode()), SamplingParams())
    assert read(**body) == expected


def test_tools_of_other_servers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    with caplog.at_level(logging.WARNING, "edgeh2o.serving"):
        for _ in range(2):
            assert read(tools=[search, TOOL]) == read(tools=[TOOL])
    assert [record.getMessage() for record in caplog.records] == [
        "the tool 'web_search' of type 'web_search_20250305' is left out: this server runs none "
        "itself"
    ]
    with pytest.raises(ApiError, match="names none of the tools"):
        read(tools=[search], tool_choice={"type": "tool", "name": "web_search"})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"max_tokens": 0}, "'max_tokens' must be an integer from 1"),
        ({"max_tokens": "5"}, "'max_tokens' must be an integer"),
        ({"messages": []}, "at least one message"),
        ({"messages": [], "system": "be kind"}, "at least one message"),
        ({"messages": "hello"}, "'messages' must be an array of objects"),
        ({"messages": [SAY] * 5000}, "more than 4096"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role' must be"),
        ({"messages": [{"content": "x"}]}, "'messages[0].role' must be"),
        ({"messages": [{"role": "user"}]}, "'messages[0].content' must be text"),
        ({"messages": [{"role": "user", "content": [1]}]}, "'messages[0].content' must be"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "content[0].type': this model reads",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "this model reads text only",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}
                ]
            },
            "'messages[0].content[0].content[0].type': this model reads text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]},
            "'messages[0].content[0].name' must be the name of a tool",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "name": "f", "input": "x"}],
                    }
                ]
            },
            "'messages[0].content[0].input' must be an object",
        ),
        ({"system": 5}, "'system' must be text"),
        ({"system": [IMAGE]}, "'system[0].type': this model reads text only"),
        ({"stop_sequences": [""]}, "'stop_sequences' must be"),
        ({"temperature": "hot"}, "'temperature' must be a number"),
        ({"tools": [{"input_schema": {}}]}, "'tools[0].name' must be 1 to 128"),
        ({"tools": [{"name": "a b"}]}, "'tools[0].name' must be 1 to 128"),
        (
            {"tools": [{"name": "a", "input_schema": 1}]},
            "'tools[0].input_schema' must be an object",
        ),
        ({"tool_choice": "auto"}, "'tool_choice' must be an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "'tool_choice.type' must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "names none of the tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"thinking": {"type": "maybe"}}, "'thinking.type' must be"),
        ({"thinking": True}, "'thinking' must be an object"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema'"),
        ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format.type' must be"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError) as told:
        read(**body)
    assert part in told.value.message and told.value.status == 400
    said = told.value.describe("/v1/messages")
    assert said == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": told.value.message},
    }
