"""Calls without marks: where the marks are control tokens, which answers do not show.

LFM2 and Llama 3.2 write a list of calls as Python has them, ``[add(a=1), add(a=2)]``; Ministral 3
and Mistral Small 3.2 a name and JSON, ``add{"a": 1}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .tools import ToolCall, parse_calls, whole_characters

_NAME = re.compile(r"\s*([\w.-]+)\s*", re.ASCII)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_WORD = re.compile(r"[-+]?[\w.]+(?:[eE][-+]?\d+)?", re.ASCII)
_BLANKS = re.compile(r"\s*")
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
MAX_DEPTH = 32


def begins_call(text: str, names: Sequence[str]) -> bool:
    """Whether a name and JSON begin ``text``."""
    return any(text.startswith(f"{name}{{") for name in names)


def may_begin_call(text: str, names: Sequence[str]) -> bool:
    """Whether they may, once more of it is there."""
    return any(f"{name}{{".startswith(text) for name in names)


def parse_bare_calls(text: str, names: Sequence[str]) -> tuple[list[ToolCall], str] | None:
    """The calls that ``text`` begins with, and what follows them; None if it is anything else."""
    try:
        if text.lstrip().startswith("["):
            return _PythonReader(text, names).read()
        return _read_named(text, names)
    except (ValueError, RecursionError):
        return None


def _read_named(text: str, names: Sequence[str]) -> tuple[list[ToolCall], str]:
    calls: list[ToolCall] = []
    place = 0
    while (found := _NAME.match(text, place)) and text.startswith("{", found.end()):
        _, end = json.JSONDecoder(strict=False).raw_decode(text, found.end())
        written = {"name": found[1], "arguments": text[found.end() : end]}
        calls += _require(parse_calls(json.dumps(written), names))
        place = end
    return _require(calls), text[place:].lstrip()


def _require(calls: list[ToolCall] | None) -> list[ToolCall]:
    if not calls:
        raise ValueError("no call")
    return calls


class _PythonReader:
    """Reads a list of calls with keywords; values are as Python or JSON has them."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self._text, self._names = text, names
        self._at = 0

    def read(self) -> tuple[list[ToolCall], str]:
        calls = [self._call() for _ in self._items("[", "]")]
        return _require(calls), self._text[self._at :].lstrip()

    def _call(self) -> ToolCall:
        name = self._name()
        if name not in self._names:
            raise ValueError("no such function")
        arguments: dict[str, Any] = {}
        for _ in self._items("(", ")"):
            key = self._name()
            self._expect("=")
            arguments[key] = self._value(MAX_DEPTH)
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ToolCall(name, whole_characters(written))

    def _items(self, begin: str, end: str) -> Any:
        """Goes on once for each item between the two, which commas part."""
        self._expect(begin)
        while not self._take(end):
            yield
            if not self._take(","):
                self._expect(end)
                return

    def _value(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError("nested too deep")
        self._skip()
        text, place = self._text, self._at
        if text.startswith("[", place):
            return [self._value(depth - 1) for _ in self._items("[", "]")]
        if text.startswith("{", place):
            found: dict[str, Any] = {}
            for _ in self._items("{", "}"):
                key = self._value(depth - 1)
                self._expect(":")
                found[str(key)] = self._value(depth - 1)
            return found
        if quoted := _TEXT.match(text, place):
            self._at = quoted.end()
            return _unquote(quoted[0])
        word = _WORD.match(text, place)
        if word is None:
            raise ValueError("no value")
        self._at = word.end()
        return _CONSTANTS[word[0]] if word[0] in _CONSTANTS else json.loads(word[0])

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise ValueError("no name")
        self._at = found.end()
        return found[1]

    def _skip(self) -> None:
        blanks = _BLANKS.match(self._text, self._at)
        assert blanks is not None, "there may be none"
        self._at = blanks.end()

    def _take(self, text: str) -> bool:
        self._skip()
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise ValueError(f"{text!r} is missing")


def _unquote(quoted: str) -> str:
    """The text between quotes of either kind, with the escapes of JSON."""
    inside = quoted[1:-1].replace("\\'", "'")
    if quoted[0] == "'":
        inside = re.sub(r'\\.|"', lambda found: '\\"' if found[0] == '"' else found[0], inside)
    value = json.loads(f'"{inside}"', strict=False)
    assert isinstance(value, str)
    return value
