"""Messages of conversations as templates read them, out of the bodies of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .api_error import ApiError
from .fields import Fields

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_CALLS = 128
_ROLE = re.compile(r"[\w-]{1,64}", re.ASCII)
_TEXTS = ("content", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_message(message: Fields) -> dict[str, Any]:
    """A message of ``/v1/chat/completions``. Raises ApiError."""
    read: dict[str, Any] = {"role": read_role(message), "content": read_content(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.text(name)) is not None:
            read[name] = value
    calls = message.objects("tool_calls", MAX_CALLS)
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def read_continuation(
    fields: Fields, messages: Sequence[Mapping[str, Any]], *, goes_on: bool
) -> dict[str, Any]:
    """Which text of the last message the answer goes on with, and whether one is begun at all.

    ``continue_final_message`` is true, as of vLLM, or the name of that text; where it is not there,
    ``goes_on`` says whether a last message of the assistant without calls is such a beginning.
    Raises ApiError for one that cannot be.
    """
    given, begins = fields.raw("continue_final_message"), fields.raw("add_generation_prompt")
    last = messages[-1]
    if given is None:
        given = goes_on and last["role"] == "assistant" and not last.get("tool_calls")
    if given not in (True, False, *_TEXTS):
        fields.refuse("continue_final_message", "true, false, 'content' or 'reasoning_content'")
    if not given:
        return {"begins_answer": fields.flag("add_generation_prompt", True)}
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise ApiError(
            "'continue_final_message' needs a last message of the assistant, without calls",
            param="continue_final_message",
        )
    if begins is True:
        raise ApiError(
            "'add_generation_prompt' and going on with the last message exclude each other",
            param="add_generation_prompt",
        )
    is_thought = not last["content"] and last.get("reasoning_content")
    return {"continues": given if given in _TEXTS else _TEXTS[1 if is_thought else 0]}


def read_role(message: Fields) -> str:
    """The role of a message; OpenAI's newer name of the system is the older one."""
    role = message.text("role")
    if role is None or not _ROLE.fullmatch(role):
        message.refuse("role", "a role such as 'user' or 'assistant'")
    return "system" if role == "developer" else role


def read_content(fields: Fields, name: str = "content") -> str:
    """The text of a field that is text, or parts of text, which become lines; "" for none."""
    return "\n".join(read_texts(fields, name))


def read_texts(fields: Fields, name: str) -> list[str]:
    """The parts of such a field. Raises ApiError for one that is no text."""
    content = fields.raw(name)
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        fields.refuse(name, "text or an array of parts")
    return [read_text(part, _TEXT_PARTS) for part in fields.objects(name, MAX_PARTS)]


def read_text(part: Fields, types: Collection[str]) -> str:
    """That of a part of one of the ``types``. Raises ApiError for a picture or the like."""
    if part.text("type") not in types:
        label = part.label("type")
        raise ApiError(f"'{label}': this model reads text only", param=label)
    text = part.text("text")
    if text is None:
        part.refuse("text", "a string")
    return text


def _read_call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    name = None if function is None else function.text("name")
    if function is None or not name:
        call.refuse("function", "an object with a name")
    return make_call(call.text("id"), name, function.raw("arguments"))


def make_call(call_id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """A call of an earlier answer, as templates read it."""
    if isinstance(arguments, str):
        # Templates write objects; what is none stays as the model wrote it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {
        "id": call_id or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
