"""What clients of Anthropic's Messages API ask for, as the requests that chats are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .api_error import ApiError
from .chat_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    make_call,
    read_content,
    read_role,
    read_text,
    read_texts,
)
from .fields import Fields
from .output_form import read_flat_grammar
from .requests import MAX_TOKENS, GenerationRequest, make_chat_request
from .tools import Tool, ToolChoice, choose_mode, choose_tool, read_flat_tools

if TYPE_CHECKING:
    from ..sampling_config import SamplingParams

_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
# Claude Code begins the instructions by a line that is another one in every request, and is meant
# for Anthropic's accounts: behind it nothing that was read before would serve.
_BILLING = "x-anthropic-billing-header:"


def read_messages_request(
    fields: Fields, defaults: SamplingParams, *, needs_most: bool = True
) -> GenerationRequest:
    """A body of ``/v1/messages``. Raises as ``read_chat_request``.

    ``needs_most``: whether it must say how many tokens the answer may have.
    """
    if fields.integer("max_tokens", 1, MAX_TOKENS) is None and needs_most:
        raise ApiError("'max_tokens' is missing", param="max_tokens")
    instructions = [text for text in read_texts(fields, "system") if not text.startswith(_BILLING)]
    messages = [
        turn
        for message in fields.objects("messages", MAX_MESSAGES)
        for turn in _read_message(message)
    ]
    if messages and instructions:
        messages.insert(0, {"role": "system", "content": "\n".join(instructions)})
    tools = read_flat_tools(fields, (None, "custom"), "input_schema")
    choice = fields.object("tool_choice")
    form = fields.object("output_config")
    return make_chat_request(
        fields,
        defaults,
        messages,
        stop="stop_sequences",
        tools=tools,
        tool_choice=choose_mode(tools, "auto") if choice is None else _read_choice(choice, tools),
        is_one_call=choice is not None and choice.flag("disable_parallel_tool_use"),
        grammar=read_flat_grammar(fields, None if form is None else form.object("format")),
        template_variables=_read_thinking(fields),
    )


def _read_choice(choice: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    kind = choice.text("type")
    if kind == "tool":
        return choose_tool(tools, choice.text("name"))
    if kind not in _CHOICES:
        choice.refuse("type", '"auto", "any", "tool" or "none"')
    return choose_mode(tools, _CHOICES[kind])


def _read_thinking(fields: Fields) -> Mapping[str, Any]:
    """As variables of templates; ``adaptive`` leaves it to them, as does what is not there."""
    thinking = fields.object("thinking")
    kind = None if thinking is None else thinking.text("type")
    if thinking is not None and kind not in ("adaptive", *_THINKING):
        thinking.refuse("type", '"enabled", "disabled" or "adaptive"')
    return _THINKING.get(kind or "", {})


def _read_message(message: Fields) -> Iterator[dict[str, Any]]:
    """The messages that one is: results of calls are messages of their own."""
    role = read_role(message)
    if role not in _ROLES:
        message.refuse("role", '"user" or "assistant"')
    content = message.raw("content")
    if not isinstance(content, list):
        if not isinstance(content, str):
            message.refuse("content", "text or an array of blocks")
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _read_answer(message)
    else:
        yield from _read_question(message, role)


def _read_question(message: Fields, role: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for block in message.objects("content", MAX_PARTS):
        if block.text("type") != "tool_result":
            texts.append(read_text(block, ("text",)))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        call_id = block.text("tool_use_id") or ""
        yield {"role": "tool", "content": read_content(block), "tool_call_id": call_id}
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _read_answer(message: Fields) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in message.objects("content", MAX_PARTS):
        kind = block.text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            name = block.text("name")
            if not name:
                block.refuse("name", "the name of a tool")
            calls.append(make_call(block.text("id"), name, dict(block.mapping("input"))))
        elif kind != "redacted_thinking":  # which nobody here can read
            texts.append(read_text(block, ("text",)))
    read: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        read["reasoning_content"] = "\n".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return read
