"""Tools: how the model is told of them, and how its calls are found in what it writes."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..engine.grammar import Grammar, rebase_references
from .api_error import ApiError
from .fields import Fields

_logger = logging.getLogger(__name__)

MAX_TOOLS = 128
NAMESPACE = "namespace"  # the type of tools that stand together, in the Responses API
ALLOWED = "allowed_tools"  # the type of a choice among some of the tools
_NAME = re.compile(r"[\w-]{1,128}", re.ASCII)  # OpenAI has 64, Anthropic 128
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot hold
_CUT_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[\w-]+)"\s*'
    r'(?:,\s*(?:"(?:arguments|parameters)"\s*(?::\s*(?P<arguments>.*))?|"[a-z]*)?)?',
    re.ASCII | re.DOTALL,
)
CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
# For models whose template says nothing of tools: the words of the Hermes format, which several
# families were trained on.
_INSTRUCTIONS = """You may call functions to answer. They are, as JSON:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between these tags:
<tool_call>
{{"name": "<function>", "arguments": {{...}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tools that stand together, such as those of one server of MCP."""

    name: str
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call by its ``name``; ``source`` is what it is shown of it.

    That is as the client gave it, but for names in a ``namespace``.
    """

    name: str
    parameters: Mapping[str, Any]
    source: Mapping[str, Any]
    is_strict: bool = False
    namespace: Namespace | None = None
    own_name: str | None = None  # in it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``mode`` is "none", "auto" or "required"; only ``names`` may be called, if there are any."""

    mode: str
    names: tuple[str, ...] = ()

    def allows(self, tool: Tool) -> bool:
        """Whether an answer may be a call of it."""
        return self.mode != "none" and (not self.names or tool.name in self.names)

    @property
    def is_forced(self) -> bool:
        """Whether the answer is a call."""
        return self.mode == "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is JSON text."""

    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """As in an answer, with an id of its own."""
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The field ``tools``. Raises ApiError for anything but functions with a name."""
    tools = []
    for entry in fields.objects("tools", MAX_TOOLS):
        function = entry.object("function")
        if entry.raw("type") != "function" or function is None:
            entry.refuse("type", '"function", with an object "function"')
        tools.append(_make_tool(function, dict(entry.mapping("function"))))
    return tuple(tools)


def read_flat_tools(
    fields: Fields, kinds: Sequence[str | None], schema: str = "parameters"
) -> tuple[Tool, ...]:
    """As ``read_tools``, of functions whose name and ``schema`` stand beside their type.

    Tools that are none of ``kinds`` are such as other servers run themselves, a search of the web:
    agents that name them do without, and the log says so. One of the kinds may be ``NAMESPACE``,
    whose tools are of the others.
    """
    tools: list[Tool] = []
    for entry in fields.objects("tools", MAX_TOOLS):
        kind = entry.text("type")
        if kind not in kinds:
            _note_left_out(f"{entry.text('name') or ''}"[:100], f"{kind}"[:100])
        elif kind == NAMESPACE:
            own_kinds = [each for each in kinds if each != NAMESPACE]
            tools += _read_namespace(entry, own_kinds, schema)
        else:
            given = {"name": entry.raw("name"), "description": entry.raw("description")}
            given["parameters"] = entry.raw(schema)
            source = {name: value for name, value in given.items() if value is not None}
            tools.append(_make_tool(entry, source, schema))
    if len(tools) > MAX_TOOLS:
        fields.refuse("tools", f"at most {MAX_TOOLS} tools, those of namespaces included")
    if NAMESPACE in kinds:
        _refuse_alike(fields, tools)
    return tuple(tools)


def _read_namespace(entry: Fields, kinds: Sequence[str | None], schema: str) -> list[Tool]:
    """The tools of a namespace, by names that have its own before them."""
    namespace = Namespace(_read_name(entry), entry.text("description"))
    tools = []
    for tool in read_flat_tools(entry, kinds, schema):
        name = name_within(namespace.name, tool.name)
        function = {**tool.source["function"], "name": name}
        source = {**tool.source, "function": function}
        tools.append(
            replace(tool, name=name, source=source, namespace=namespace, own_name=tool.name)
        )
    return tools


def name_within(namespace: str | None, name: str) -> str:
    """By which the model calls a tool of a namespace; those of MCP may end with the underscores."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _refuse_alike(fields: Fields, tools: Sequence[Tool]) -> None:
    """Raises ApiError where a call would not say which of two tools is meant."""
    places: dict[str, Namespace | None] = {}
    for tool in tools:
        if places.setdefault(tool.name, tool.namespace) != tool.namespace:
            fields.refuse("tools", f"names that differ: the model would call two {tool.name!r}")


@lru_cache(maxsize=64)  # an agent names them in every request
def _note_left_out(name: str, kind: str) -> None:
    _logger.warning("the tool %r of type %r is left out: this server runs none itself", name, kind)


def _make_tool(function: Fields, source: Mapping[str, Any], schema: str = "parameters") -> Tool:
    name = _read_name(function)
    parameters = function.mapping(schema) or {"type": "object", "properties": {}}
    function.text("description")
    shown = {"type": "function", "function": source}
    return Tool(name, parameters, shown, function.flag("strict"))


def _read_name(entry: Fields) -> str:
    name = entry.text("name")
    if name is None or not _NAME.fullmatch(name):
        entry.refuse("name", "1 to 128 letters, digits, _ and -")
    return name


def read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """The field ``tool_choice``. Raises ApiError for one that names no tool."""
    value = fields.raw("tool_choice")
    if not isinstance(value, dict):
        return read_mode(fields, tools)
    choice = Fields(value, "tool_choice")
    if choice.raw("type") == ALLOWED:
        return choose_allowed(tools, choice.object(ALLOWED) or choice, _name_of_choice)
    return choose_tool(tools, _name_of_choice(choice))


def _name_of_choice(choice: Fields) -> str | None:
    function = choice.object("function")
    return None if function is None else function.text("name")


def read_mode(fields: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """The field ``tool_choice`` where it is a word. Raises ApiError for any other."""
    value = fields.raw("tool_choice")
    if value not in (None, "none", "auto", "required"):
        fields.refuse("tool_choice", '"none", "auto", "required" or a function')
    return choose_mode(tools, value or "auto")


def choose_mode(tools: Sequence[Tool], mode: str) -> ToolChoice:
    """Raises ApiError where a call is required and there is nothing to call."""
    if mode == "required" and not tools:
        raise ApiError("'tool_choice' is required and there are no tools", param="tool_choice")
    return ToolChoice(mode if tools else "none")


def choose_tool(tools: Sequence[Tool], name: str | None) -> ToolChoice:
    """A call of one function. Raises ApiError where that is none of the tools."""
    if name not in {tool.name for tool in tools}:
        raise ApiError("'tool_choice' names none of the tools", param="tool_choice")
    return ToolChoice("required", (str(name),))


def choose_allowed(
    tools: Sequence[Tool], allowed: Fields, read_name: Callable[[Fields], str | None]
) -> ToolChoice:
    """A call of some of the tools, all of which the prompt has. Raises ApiError for others."""
    mode = allowed.text("mode")
    if mode not in ("auto", "required"):
        allowed.refuse("mode", '"auto" or "required"')
    names = {read_name(each) for each in allowed.objects("tools", MAX_TOOLS)}
    known = tuple(tool.name for tool in tools if tool.name in names)
    if not names or len(known) < len(names):
        raise ApiError("'tool_choice' allows none, or others than the tools", param="tool_choice")
    return ToolChoice(mode, known)


def grammar_of_call(tools: Sequence[Tool], choice: ToolChoice) -> Grammar:
    """JSON of one call, to one of the tools.

    What of their schemas cannot be enforced is ignored, unless all of them are strict.
    """
    callable_tools = [tool for tool in tools if choice.allows(tool)]
    calls = []
    for index, tool in enumerate(callable_tools):
        place = "" if len(callable_tools) == 1 else f"/anyOf/{index}"
        parameters = rebase_references(tool.parameters, f"{place}/properties/arguments")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": parameters},
                "required": ["name", "arguments"],
            }
        )
    return Grammar.of_schema(
        calls[0] if len(calls) == 1 else {"anyOf": calls},
        is_strict=all(tool.is_strict for tool in callable_tools),
    )


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, has_system_role: bool = True
) -> list[Mapping[str, Any]]:
    """The messages with a description of the tools.

    It ends the first system message; in a template without that role it begins the first message
    of the user.
    """
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.source) for tool in tools))
    rest = list(messages)
    if has_system_role:
        if rest and rest[0]["role"] == "system":
            text = f"{rest.pop(0)['content']}\n\n{text}"
        return [{"role": "system", "content": text}, *rest]
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = {**message, "content": f"{text}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": text}, *rest]


def write_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with calls and results as text, for a template that knows neither.

    Results that follow each other are one message: such templates want the roles to take turns.
    """
    texts: list[Mapping[str, Any]] = []
    previous = ""
    for message in messages:
        text = _as_text(message)
        if message["role"] == previous == "tool":
            text = {**text, "content": f"{texts.pop()['content']}\n{text['content']}"}
        texts.append(text)
        previous = message["role"]
    return texts


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"{CALL_BEGINS}\n{json.dumps(call['function'])}\n{CALL_ENDS}" for call in calls]
    return {"role": message["role"], "content": "\n".join([message["content"], *texts]).strip()}


def parse_calls(text: str, names: Sequence[str]) -> list[ToolCall] | None:
    """The calls that JSON text is: an object with a name and arguments, or an array of such.

    None if it is anything else, or calls what is not there. NaN and Infinity, which Python's reader
    takes and writes, are no JSON.
    """
    try:
        value = json.loads(text, strict=False)  # line ends within a text become escapes
        calls = []
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or item.get("name") not in names:
                return None
            arguments = item.get("arguments", item.get("parameters", {}))
            if isinstance(arguments, str):
                json.loads(arguments, parse_constant=_refuse_constant)
            elif isinstance(arguments, dict):
                arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            else:
                return None
            calls.append(ToolCall(item["name"], whole_characters(arguments)))
    except (ValueError, RecursionError):
        return None
    return calls or None


def whole_characters(text: str) -> str:
    """``text`` with U+FFFD for halves of characters."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_cut_call(text: str, names: Sequence[str]) -> ToolCall | None:
    """The call that ``text`` begins, as ``grammar_of_call`` has it, with the arguments so far.

    None where it does not get as far as the name of a function.
    """
    found = _CUT_CALL.fullmatch(text)
    if found is None or found["name"] not in names:
        return None
    arguments = found["arguments"] or ""
    with suppress(ValueError, RecursionError):  # what follows complete arguments is not theirs
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    return ToolCall(found["name"], arguments)


def may_become_call(text: str, names: Sequence[str]) -> bool:
    """Whether ``text`` is a call as far as it goes, which is not to the end of a name."""
    compact = "".join(text.split())
    return any(f'{{"name":"{name}"'.startswith(compact) for name in names)
