"""What clients ask for, read from the bodies of OpenAI's interface and its usual extensions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..config import SamplingParams
from ..engine.grammar import Grammar
from ..errors import UsageError
from .api_error import ApiError
from .fields import Fields
from .tools import Tool, ToolChoice, read_tool_choice, read_tools

MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**30
MAX_BIASES = 1024
_ROLE = re.compile(r"[\w-]{1,64}", re.ASCII)
# Fields that would change the answer and have no meaning here.
_REFUSED = {"best_of": 1, "n": 1, "suffix": None, "echo": False, "audio": None, "functions": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with everything that decides its answer; nothing in it was changed since."""

    kind: Literal["chat", "text"]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    sampling: SamplingParams
    place: int | None = None  # at which it is to be answered
    stream: bool = False
    include_usage: bool = False
    wants_progress: bool = False
    top_logprobs: int | None = None  # None: no logarithms at all
    bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def read_chat_request(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    """A body of ``/v1/chat/completions``; ``defaults`` fill in what it leaves open.

    Raises ApiError for what cannot be served. Unknown fields are ignored, as clients expect.
    """
    messages = fields.objects("messages", MAX_MESSAGES)
    if not messages:
        raise ApiError("'messages' must have at least one message", param="messages")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if top_logprobs is not None and not wants_logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    tools = read_tools(fields)
    request = GenerationRequest(
        kind="chat",
        messages=tuple(_read_message(message) for message in messages),
        top_logprobs=(top_logprobs or 0) if wants_logprobs else None,
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        template_variables=dict(fields.mapping("chat_template_kwargs")),
        **_read_common(fields, defaults, "max_completion_tokens"),
    )
    if request.grammar is not None and request.tool_choice.is_forced:
        raise ApiError("'response_format' and a required tool call exclude each other")
    return request


def read_text_request(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    """A body of ``/v1/completions``: a text, or token ids. Raises as ``read_chat_request``."""
    return GenerationRequest(
        kind="text",
        prompt=_read_prompt(fields),
        top_logprobs=fields.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        **_read_common(fields, replace(defaults, max_tokens=_text_tokens(defaults))),
    )


def read_completion_request(
    fields: Fields, defaults: SamplingParams, prompt: tuple[int, ...] | None = None
) -> GenerationRequest:
    """A body of llama-server's ``/completion``, its ``prompt`` perhaps made of other fields.

    Raises as ``read_chat_request``.
    """
    return GenerationRequest(
        kind="text",
        prompt=prompt or _read_prompt(fields),
        top_logprobs=fields.integer("n_probs", 0, MAX_TOP_LOGPROBS) or None,
        **_read_common(fields, defaults, "n_predict"),
    )


def _read_prompt(fields: Fields) -> str | tuple[int, ...]:
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, (str, tuple)):
        fields.refuse("prompt", "one text, or one array of token ids")
    if not prompt:
        raise ApiError("'prompt' must not be empty", param="prompt")
    return prompt


def _text_tokens(defaults: SamplingParams) -> int:
    """OpenAI's default of completions is 16; raw text of small models has no end of its own."""
    return 16 if defaults.max_tokens < 0 else defaults.max_tokens


def _read_common(fields: Fields, defaults: SamplingParams, *names_of_most: str) -> dict[str, Any]:
    """``names_of_most``: names of ``max_tokens`` before that and that of llama-server."""
    for name, neutral in _REFUSED.items():
        if fields.raw(name) not in (None, neutral):
            raise ApiError(f"'{name}' is not supported; leave it out", param=name)
    options = fields.object("stream_options")
    stream = fields.flag("stream")
    place = fields.integer("id_slot", -1, MAX_TOKENS)  # of llama-server; -1 is any
    return {
        "place": None if place == -1 else place,
        "sampling": _read_sampling(
            fields, defaults, fields.first(*names_of_most, "max_tokens", "n_predict")
        ),
        "stream": stream,
        "include_usage": options is not None and options.flag("include_usage"),
        "wants_progress": fields.flag("return_progress")
        or (options is not None and options.flag("include_progress")),
        "bias": _read_bias(fields),
        "presence_penalty": fields.number("presence_penalty", -2, 2, 0.0),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2, 0.0),
        "grammar": _read_grammar(fields),
    }


def _read_sampling(fields: Fields, defaults: SamplingParams, most: str) -> SamplingParams:
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    given = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1, 2**20),
        "min_p": fields.number("min_p", 0, 1),
        "repeat_penalty": fields.number(
            fields.first("repetition_penalty", "repeat_penalty"), 0.01, 10
        ),
        "repeat_last_n": fields.integer("repeat_last_n", -1, 2**20),
        "max_tokens": fields.integer(most, -1, MAX_TOKENS),
        "seed": seed if seed in (None, -1) else seed % 2**64,  # -1 is random, as in llama-server
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if values.get("top_p") == 0:  # as good as greedy
        values["top_p"] = 1e-9
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("max_tokens", -1) >= 0:
        values["max_tokens"] = min(values["max_tokens"], 2**20)
    stop = fields.texts("stop", MAX_STOPS)
    try:
        return replace(
            defaults,
            **values,
            stop=stop or defaults.stop,
            ignore_eos=fields.flag("ignore_eos", defaults.ignore_eos),
        )
    except UsageError as error:
        raise ApiError(str(error)) from None


def _read_bias(fields: Fields) -> dict[int, float]:
    given = fields.raw("logit_bias")
    if isinstance(given, list):  # of llama-server: pairs, whose value may be false for never
        is_paired = all(isinstance(pair, list) and len(pair) == 2 for pair in given)
        if not is_paired or not all(type(pair[0]) is int for pair in given):
            fields.refuse("logit_bias", "an object, or pairs of a token id and a number")
        entries = [(str(i), -100 if value is False else value) for i, value in given]
    else:
        entries = list(fields.mapping("logit_bias").items())
    if len(entries) > MAX_BIASES:
        raise ApiError(f"'logit_bias' has more than {MAX_BIASES} entries", param="logit_bias")
    biases = {}
    for name, value in entries:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not name.isdecimal() or len(name) > 9 or not is_number or not -100 <= value <= 100:
            raise ApiError(
                "'logit_bias' maps token ids to numbers from -100 to 100", param="logit_bias"
            )
        biases[int(name)] = float(value)
    return biases


def _read_grammar(fields: Fields) -> Grammar | None:
    form = fields.object("response_format")
    kind = None if form is None else form.text("type")
    try:
        if form is None or kind in (None, "text"):
            return _read_bare_grammar(fields)
        if kind == "json_object":
            schema = form.raw("schema")  # an extension of several servers
            if schema is None:
                return Grammar.any_json_object()
            return Grammar.of_schema(schema, is_strict=False)
        if kind == "json_schema":
            outer = form.object("json_schema")
            schema = None if outer is None else outer.raw("schema")
            if outer is None or schema is None:
                form.refuse("json_schema", 'an object with a "schema"')
            return Grammar.of_schema(schema, is_strict=outer.flag("strict"))
        if kind in ("regex", "lark", "gbnf"):
            text = form.text(str(kind))
            if not text:
                form.refuse(str(kind), "a non-empty string")
            return Grammar(kind, text)  # type: ignore[arg-type]
    except UsageError as error:
        if isinstance(error, ApiError):
            raise
        raise ApiError(str(error), param="response_format") from None
    form.refuse("type", "text, json_object, json_schema, regex, lark or gbnf")


def _read_bare_grammar(fields: Fields) -> Grammar | None:
    """As clients of llama-server send it. Raises UsageError."""
    if text := fields.text("grammar"):
        return Grammar("gbnf", text)
    schema = fields.raw("json_schema")
    return None if schema is None else Grammar.of_schema(schema, is_strict=False)


def _read_message(message: Fields) -> dict[str, Any]:
    role = message.text("role")
    if role is None or not _ROLE.fullmatch(role):
        message.refuse("role", "a role such as 'user' or 'assistant'")
    if role == "developer":  # OpenAI's newer name
        role = "system"
    read: dict[str, Any] = {"role": role, "content": _read_content(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := message.text(name)) is not None:
            read[name] = value
    calls = message.objects("tool_calls", 128)
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def _read_content(message: Fields) -> str:
    content = message.raw("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message.refuse("content", "text or an array of parts")
    texts = []
    for part in message.objects("content", 4096):
        kind, text = part.text("type"), part.text("text")
        if kind not in ("text", "input_text") or text is None:
            raise ApiError(
                f"'{part.label('type')}': this model reads text only", param=part.label("type")
            )
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    if function is None or not function.text("name"):
        call.refuse("function", "an object with a name")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        # Templates write objects; what is none stays as the model wrote it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {
        "id": call.text("id") or "",
        "type": "function",
        "function": {"name": function.text("name"), "arguments": arguments},
    }
