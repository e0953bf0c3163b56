"""What clients of OpenAI's Responses API ask for, as the requests that chats are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api_error import ApiError
from .chat_messages import MAX_MESSAGES, MAX_PARTS, make_call, read_content, read_role
from .fields import Fields
from .output_form import read_flat_grammar
from .requests import GenerationRequest, make_chat_request, read_effort
from .tools import (
    ALLOWED,
    NAMESPACE,
    Tool,
    ToolChoice,
    choose_allowed,
    choose_tool,
    name_within,
    read_flat_tools,
    read_mode,
)

if TYPE_CHECKING:
    from ..sampling_config import SamplingParams

# A turn with a call is three of them: the call, its result, and what was thought before.
MAX_ITEMS = 4 * MAX_MESSAGES
# What would have to be kept here between two requests.
_STORED = ("previous_response_id", "conversation", "prompt")


def read_responses_request(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    """A body of ``/v1/responses``. Raises as ``read_chat_request``."""
    for name in _STORED:
        if fields.raw(name) is not None:
            raise ApiError(
                f"'{name}' is not supported: this server keeps no answers; send the whole "
                "conversation as 'input'",
                param=name,
            )
    if fields.flag("background"):
        raise ApiError("'background' is not supported; leave it out", param="background")
    form, reasoning = fields.object("text"), fields.object("reasoning")
    tools = read_flat_tools(fields, ("function", NAMESPACE))
    return make_chat_request(
        fields,
        defaults,
        _read_messages(fields),
        "max_output_tokens",
        goes_on=False,
        tools=tools,
        tool_choice=_read_choice(fields, tools),
        is_one_call=not fields.flag("parallel_tool_calls", True),
        grammar=read_flat_grammar(fields, None if form is None else form.object("format")),
        template_variables={} if reasoning is None else read_effort(reasoning, "effort"),
    )


def _read_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    value = fields.raw("tool_choice")
    if not isinstance(value, dict):
        return read_mode(fields, tools)
    choice = Fields(value, "tool_choice")
    if choice.raw("type") == ALLOWED:
        return choose_allowed(tools, choice, _read_call_name)
    is_function = choice.raw("type") == "function"
    return choose_tool(tools, _read_call_name(choice) if is_function else None)


def _read_call_name(item: Fields) -> str | None:
    """That by which the model calls what an item names."""
    name = item.text("name")
    return name and name_within(item.text("namespace"), name)


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.raw("input")
    messages: list[dict[str, Any]] = []
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in fields.objects("input", MAX_ITEMS):
            _add_item(messages, item)
    else:
        fields.refuse("input", "text or an array of items")
    if not messages:
        raise ApiError("'input' must have at least one message", param="input")
    if instructions := fields.text("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    return _join_instructions(messages)


def _join_instructions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those at the beginning as one: many templates take a single one, and agents send several."""
    n_first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if n_first < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:n_first])
    return [{"role": "system", "content": text}, *messages[n_first:]]


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    """A turn of the model is one message, but several items: thoughts, a text, calls."""
    kind = item.text("type") or "message"
    if kind == "message":
        role, content = read_role(item), _read_content(item)
        if role == "assistant":
            _open_answer(messages, "content")["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        thoughts = _read_thoughts(item)
        if thoughts:
            _open_answer(messages, "reasoning_content")["reasoning_content"] = thoughts
    elif kind == "function_call":
        name = _read_call_name(item)
        if not name:
            item.refuse("name", "the name of a function")
        call = make_call(item.text("call_id"), name, item.text("arguments") or "")
        _open_answer(messages, None).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        result = read_content(item, "output")
        call_id = item.text("call_id") or ""
        messages.append({"role": "tool", "content": result, "tool_call_id": call_id})
    else:
        item.refuse("type", "message, reasoning, function_call or function_call_output")


def _open_answer(messages: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The message of the model that an item belongs to: the last one, or a new one.

    A new one where that has the field ``name`` already, or one that comes after it.
    """
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and (
        name is None or not (last["content"] or last.get("tool_calls") or last.get(name))
    )
    if not is_open:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _read_content(item: Fields) -> str:
    """As of other messages, and what was refused, which is text of another name."""
    if not isinstance(item.raw("content"), list):
        return read_content(item)
    parts = item.objects("content", MAX_PARTS)
    refusals = [part.text("refusal") for part in parts if part.raw("type") == "refusal"]
    return "\n".join(each or "" for each in refusals) if refusals else read_content(item)


def _read_thoughts(item: Fields) -> str:
    """Those of an answer of this server, or others that are not encrypted."""
    texts = [part.text("text") or "" for part in item.objects("content", MAX_PARTS)]
    return "\n".join(texts)
