"""Bodies of OpenAI's Responses API: they are the requests that chats are, or refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.fields import parse_body
from edgeh2o.serving.requests import GenerationRequest, read_chat_request
from edgeh2o.serving.responses_request import read_responses_request

SAY = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
TOOL = {"type": "function", **FUNCTION, "strict": None}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
SYSTEM = {"role": "system", "content": "be kind"}


def read(**body: Any) -> GenerationRequest:
    whole = {"input": "hello"} | body
    return read_responses_request(parse_body(json.dumps(whole).encode()), SamplingParams())


def said(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {}),
        ({"input": [SAY]}, {}),
        (
            {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.5, "stream": True, "seed": 1},
            {"max_tokens": 7, "temperature": 0.5, "top_p": 0.5, "stream": True, "seed": 1},
        ),
        (
            # What has no meaning here, as agents send it.
            {
                "store": True,
                "metadata": {"a": "b"},
                "include": ["reasoning.encrypted_content"],
                "truncation": "auto",
                "prompt_cache_key": "x",
                "service_tier": "auto",
                "text": {"verbosity": "low"},
                "previous_response_id": None,
            },
            {},
        ),
        ({"instructions": "be kind"}, {"messages": [SYSTEM, SAY]}),
        (
            {
                "instructions": "be kind",
                "input": [
                    {
                        "type": "message",
                        "role": "developer",
                        "content": [said("input_text", "and"), said("input_text", "short")],
                    },
                    SAY,
                ],
            },
            {"messages": [{"role": "system", "content": "be kind\n\nand\nshort"}, SAY]},
        ),
        (
            {
                "input": [
                    SAY,
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [said("reasoning_text", "hm")],
                    },
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{**said("output_text", "well"), "annotations": []}],
                    },
                    CALL_ITEM,
                    CALL_ITEM | {"call_id": "c2"},
                    {"type": "function_call_output", "call_id": "c1", "output": "2"},
                    {
                        "type": "function_call_output",
                        "call_id": "c2",
                        "output": [said("input_text", "3")],
                    },
                    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                    {"role": "assistant", "content": "so"},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                    SAY,
                ]
            },
            {
                "messages": [
                    SAY,
                    {
                        "role": "assistant",
                        "content": "well",
                        "reasoning_content": "hm",
                        "tool_calls": [CALL, CALL | {"id": "c2"}],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    {"role": "tool", "tool_call_id": "c2", "content": "3"},
                    {"role": "assistant", "content": "so"},
                    {"role": "assistant", "content": "no"},
                    SAY,
                ]
            },
        ),
        (
            {"input": [SAY, CALL_ITEM]},
            {"messages": [SAY, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        ),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
            },
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (
            {"reasoning": {"effort": "none"}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"reasoning": {"effort": None}}, {}),
    ],
)
def test_a_body_is_the_request_of_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    whole = {"messages": [SAY]} | chat
    expected = read_chat_request(parse_body(json.dumps(whole).encode()), SamplingParams())
    assert read(**body) == expected


def test_tools_of_other_servers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    with caplog.at_level(logging.WARNING, "edgeh2o.serving"):
        assert read(tools=[*others, TOOL]) == read(tools=[TOOL])
    assert "the tool 'apply_patch' of type 'custom' is left out" in caplog.text
    with pytest.raises(ApiError, match="names none of the tools"):
        read(tools=others, tool_choice={"type": "web_search"})


def test_tools_of_namespaces_have_names_of_their_own() -> None:
    """They were left out with those that a provider runs itself: Codex has its MCP tools so."""
    others = {"type": "namespace", "name": "mcp__math", "description": "sums", "tools": [TOOL]}
    ended = {"type": "namespace", "name": "mcp__old__", "tools": [TOOL]}
    within = [
        {"type": "function", "function": FUNCTION | {"name": f"{name}__add"}}
        for name in ("mcp__math", "mcp__old")
    ]
    call = CALL_ITEM | {"namespace": "mcp__math"}
    named = CALL["function"] | {"name": "mcp__math__add"}  # type: ignore[operator]
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    got = read(
        input=[SAY, call, result],
        tools=[TOOL, others, ended],
        tool_choice={"type": "function", "name": "add", "namespace": "mcp__old__"},
    )
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": named}]}
    chat = {
        "messages": [SAY, answer, {"role": "tool", "content": "2", "tool_call_id": "c1"}],
        "tools": [CHAT_TOOL, *within],
        "tool_choice": {"type": "function", "function": {"name": "mcp__old__add"}},
    }
    expected = read_chat_request(parse_body(json.dumps(chat).encode()), SamplingParams())
    assert (got.messages, got.tool_choice) == (expected.messages, expected.tool_choice)
    assert [(t.name, t.source, t.parameters) for t in got.tools] == [
        (t.name, t.source, t.parameters) for t in expected.tools
    ]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"input": None}, "'input' must be text or an array"),
        ({"input": 5}, "'input' must be text or an array"),
        ({"input": []}, "'input' must have at least one message"),
        ({"input": [], "instructions": "x"}, "'input' must have at least one message"),
        ({"input": ["x"]}, "'input' must be an array of objects"),
        ({"input": [SAY] * 20_000}, "more than 16384"),
        ({"input": [{"role": "a b", "content": "x"}]}, "'input[0].role' must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input[0].type' must be message"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "'input[0].type' must be message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input[0].content[0].type': this model reads text only",
        ),
        ({"input": [{"type": "function_call"}]}, "'input[0].name' must be"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": {}}]},
            "'input[0].arguments' must be a string",
        ),
        (
            {"input": [{"type": "function_call_output", "output": {}}]},
            "'input[0].output' must be text",
        ),
        (
            {"input": [SAY, {"type": "reasoning", "content": "x"}]},
            "'input[1].content' must be an array",
        ),
        ({"instructions": ["x"]}, "'instructions' must be a string"),
        ({"max_output_tokens": "5"}, "'max_output_tokens' must be an integer"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation as 'input'"),
        ({"conversation": {"id": "conv_1"}}, "'conversation' is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "'prompt' is not supported"),
        ({"background": True}, "'background' is not supported"),
        ({"tools": [{"type": "function"}]}, "'tools[0].name' must be 1 to 128"),
        ({"tools": [CHAT_TOOL]}, "'tools[0].name' must be 1 to 128"),
        ({"tools": [{"type": "namespace"}]}, "'tools[0].name' must be 1 to 128"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "'tools[0].tools[0].name' must be 1 to 128",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL] * 100}] * 2},
            "at most 128 tools, those of namespaces included",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [TOOL]},
                    TOOL | {"name": "n__add"},
                ]
            },
            "names that differ: the model would call two 'n__add'",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "'tool_choice' must be"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}},
            "names none of the tools",
        ),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"text": "json"}, "'text' must be an object"),
        ({"text": {"format": {"type": "json_schema"}}}, "'text.format.schema' must be"),
        ({"reasoning": {"effort": "a b"}}, "'reasoning.effort' must be"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError) as told:
        read(**body)
    assert part in told.value.message and told.value.status == 400
    assert told.value.describe("/v1/responses") == told.value.to_dict()
