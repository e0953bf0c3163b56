"""Calls whose arguments stand between tags, one by one, instead of as JSON.

Between ``<tool_call>`` tags Qwen 3.5, Qwen3-Coder and Nemotron 3 write ``<function=NAME>``, and in
it ``<parameter=KEY>`` tags; GLM 4.5 and later write the name, ``<arg_key>`` and ``<arg_value>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from .tools import ToolCall, whole_characters

# The JSON schemas of the parameters of functions, by their names.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([\w-]+)>", re.ASCII)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([\w-]+)\s*", re.ASCII)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
FUNCTION_ENDS = "</function>"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}  # as Python has them too


def parse_tagged_call(text: str, schemas: Schemas, *, is_cut: bool = False) -> ToolCall | None:
    """The call that ``text``, what stands between the tags, is; None if it is none.

    A value is what the parameter's schema says, or text where it is nothing of that. Of a call that
    ``is_cut`` before its end there are the complete arguments, and the JSON of them is not closed.
    """
    function = _FUNCTION.match(text)
    named = function or _NAME.match(text)
    if named is None or named[1] not in schemas:
        return None
    name, place = named[1], named.end()
    properties = schemas[name].get("properties")
    arguments: dict[str, Any] = {}
    pattern = _ARGUMENT if function is None else _PARAMETER
    while found := pattern.match(text, place):
        key, place = found[1].strip(), found.end()
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _read_value(found[2], schema)
    rest = text[place:].strip()
    if not is_cut and rest != ("" if function is None else FUNCTION_ENDS):
        return None
    written = whole_characters(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    return ToolCall(name, written[:-1] if is_cut else written)


def may_become_tagged_call(text: str, schemas: Schemas) -> bool:
    """Whether ``text`` is a call as far as it goes, which is not to the end of a name."""
    begun = text.strip()
    return any(f"<function={name}>".startswith(begun) or name.startswith(begun) for name in schemas)


def _read_value(text: str, schema: object) -> Any:
    """The line ends next to the tags are no part of it."""
    text = text.removeprefix("\n").removesuffix("\n")
    types, bare = _types_of(schema), text.strip()
    if "string" in types and not (bare == "null" and "null" in types):
        return text
    if bare.lower() in _CONSTANTS:
        return _CONSTANTS[bare.lower()]
    try:
        value = json.loads(bare)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _types_of(schema: object) -> set[str]:
    """The types that a schema allows, as far as it says them."""
    if not isinstance(schema, Mapping):
        return set()
    types = {each for each in _as_list(schema.get("type")) if isinstance(each, str)}
    for choice in ("anyOf", "oneOf"):
        for part in _as_list(schema.get(choice)):
            types |= _types_of(part)
    values = _as_list(schema.get("enum"))
    if not types and values and all(isinstance(each, str) for each in values):
        types = {"string"}
    return types


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
