"""Chats, messages and responses are three forms of the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from edgeh2o.serving.answer_format import AnswerFormat
from edgeh2o.serving.anthropic_format import MessagesFormat
from edgeh2o.serving.event_stream import EventStream
from edgeh2o.serving.events import Progress
from edgeh2o.serving.fields import Fields
from edgeh2o.serving.openai_format import ChatFormat
from edgeh2o.serving.responses_format import ResponsesFormat
from edgeh2o.serving.scheduler import CancelledError
from tests.serving.answering import request_of
from tests.serving.conftest import RunningServer
from tests.serving.fetching import ask

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURN = "the hen is in the pen"
SAMPLING = {"seed": 5, "temperature": 0.9, "top_p": 0.95}


def bodies_of(system: str, turns: list[tuple[str, str]], **chat: Any) -> dict[str, dict[str, Any]]:
    """The same conversation and options by every path; ``turns`` are roles and texts."""
    most = chat.pop("max_tokens", 10)
    messages = [{"role": role, "content": text} for role, text in turns]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {
            "messages": [{"role": "system", "content": system}, *messages],
            "max_tokens": most,
        },
        MESSAGES: {"system": system, "messages": messages, "max_tokens": most},
        RESPONSES: {"instructions": system, "input": messages, "max_output_tokens": most},
    }
    if chat.pop("tools", False):
        bodies[CHAT]["tools"] = [{"type": "function", "function": FUNCTION}]
        flat = {"name": "add", "description": "adds"}
        bodies[MESSAGES]["tools"] = [{**flat, "input_schema": SCHEMA}]
        bodies[RESPONSES]["tools"] = [{"type": "function", **FUNCTION}]
    if chat.pop("is_forced", False):
        bodies[CHAT]["tool_choice"] = bodies[RESPONSES]["tool_choice"] = "required"
        bodies[MESSAGES]["tool_choice"] = {"type": "any"}
    return {path: SAMPLING | body | chat for path, body in bodies.items()}


def said(path: str, answer: Any) -> tuple[str, list[Any], str]:
    """The text, the calls and why it ended, whatever form they have."""
    if path == CHAT:
        choice = answer["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        arguments = [json.loads(call["function"]["arguments"]) for call in calls]
        return choice["message"]["content"] or "", arguments, choice["finish_reason"]
    if path == MESSAGES:
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
        reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        return "".join(texts), inputs, reasons[answer["stop_reason"]]
    output = answer["output"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    arguments = [json.loads(i["arguments"]) for i in output if i["type"] == "function_call"]
    reason = "tool_calls" if arguments else "stop"
    return "".join(texts), arguments, "length" if answer["incomplete_details"] else reason


def counted(path: str, answer: Any) -> tuple[int, int, int]:
    """Tokens of the prompt, of these cached, and of the answer."""
    usage = answer["usage"]
    if path == CHAT:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, usage["completion_tokens"]
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], cached, usage["output_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": True},
        {"tools": True, "is_forced": True, "max_tokens": 200},
        {"logit_bias": {"40": 100}},
        {"grammar": 'root ::= "yes" | "no"'},
        {"presence_penalty": 1.5, "temperature": 0, "max_tokens": 20},
    ],
)
def test_the_same_request_has_the_same_answer(
    server: RunningServer, options: dict[str, Any]
) -> None:
    bodies = bodies_of(
        "be kind", [("user", TURN), ("assistant", "so"), ("user", "why?")], **options
    )
    answers = {path: ask(server, path, body) for path, body in bodies.items()}
    expected = said(CHAT, answers[CHAT])
    n_prompt, _, n_answer = counted(CHAT, answers[CHAT])
    for path in (MESSAGES, RESPONSES):
        assert said(path, answers[path]) == expected
        n_read, _, n_written = counted(path, answers[path])
        assert (n_read, n_written) == (n_prompt, n_answer)


def test_the_first_call_ends_an_answer_that_may_have_one(server: RunningServer) -> None:
    call = '<tool_call>{\\"name\\": \\"add\\", \\"arguments\\": {\\"a\\": %d}}</tool_call>'
    grammar = f'root ::= "{call % 1}" "{call % 2}"'
    several = bodies_of("s", [("user", TURN)], tools=True, grammar=grammar, max_tokens=400)
    single: dict[str, Any] = {
        CHAT: {"parallel_tool_calls": False},
        MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        RESPONSES: {"parallel_tool_calls": False},
    }
    for path, body in several.items():
        both, one = ask(server, path, body), ask(server, path, body | single[path])
        assert said(path, both) == ("", [{"a": 1}, {"a": 2}], "tool_calls")
        assert said(path, one) == ("", [{"a": 1}], "tool_calls")
        assert counted(path, one)[2] < counted(path, both)[2]


def test_a_conversation_may_move_between_the_paths(server: RunningServer) -> None:
    """What was read and written by one of them is not read again by another."""
    turns = [("user", f"{TURN}, and the art is there. " * 20)]
    n_known = 0
    for number, path in enumerate((CHAT, MESSAGES, RESPONSES, MESSAGES, CHAT)):
        answer = ask(server, path, bodies_of("of its own", turns)[path])
        n_prompt, n_cached, n_answer = counted(path, answer)
        text, _, _ = said(path, answer)
        if number:  # but for a chunk, which marks lie before
            assert n_cached >= n_known - 64 > 64
        n_known = n_prompt + n_answer
        turns += [("assistant", text), ("user", f"and {number}?")]


def stream_of(form: AnswerFormat, *chunks: Mapping[str, Any] | Exception | None) -> str:
    """What a client reads of a stream of ``form``."""
    sent: list[bytes] = []

    async def events() -> AsyncIterator[Mapping[str, Any] | None]:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def nothing() -> None:
        pass

    stream = EventStream(form, events(), nothing)
    asyncio.run(stream({"type": "http"}, receive, send))
    return b"".join(sent).decode()


def test_what_says_that_a_stream_goes_on() -> None:
    chunk = {"type": "a"}
    responses = ResponsesFormat("m", request_of("x"), Fields({}))
    comment = ": reading the prompt\n\n"
    assert stream_of(ChatFormat("m"), None, chunk) == (
        f'{comment}data: {{"type": "a"}}\n\ndata: [DONE]\n\n'
    )
    named = 'event: a\ndata: {"type": "a"}\n\n'
    assert stream_of(responses, None, None, chunk) == comment + named
    ping = 'event: ping\ndata: {"type": "ping"}\n\n'
    assert stream_of(MessagesFormat("m"), None, None, chunk) == ping + named


def test_an_error_ends_a_stream_in_its_form() -> None:
    error = CancelledError("it ends")
    chat = stream_of(ChatFormat("m"), error)
    assert json.loads(chat.split("\n")[0].removeprefix("data: "))["error"]["code"] == "cancelled"
    messages = stream_of(MessagesFormat("m"), error)
    told = {"type": "overloaded_error", "message": "it ends"}
    expected = json.dumps({"type": "error", "error": told})
    assert messages == f"event: error\ndata: {expected}\n\n"
    name, data, *_ = stream_of(ResponsesFormat("m", request_of("x"), Fields({})), error).split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "cancelled", "message": "it ends"}


def test_a_message_begins_with_what_is_read_for_it() -> None:
    (begin,) = MessagesFormat("m").begin_reading(Progress(0, 30, 70))
    usage = begin["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (30, 70)
