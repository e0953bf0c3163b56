"""Grammars of llama.cpp (GBNF) as Lark grammars for llguidance.

llguidance has a converter of its own, which makes words of regular rules, each as long as it can
be: with ``x ::= [a-z]+`` no text has the form ``x "z"``. Here every character is a word.
"""

from __future__ import annotations

import json
import re

MAX_REPETITIONS = 2000  # of one bound, as in llama.cpp
MAX_BOUNDS = 8  # of what stands before them
_NAME = re.compile(r"[\w-]+", re.ASCII)
_BOUNDS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def lark_of_gbnf(text: str) -> str:
    """The grammar as Lark. Raises ValueError, with the line, for one that is wrong."""
    try:
        return _Reader(text).read()
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class _Reader:
    """Reads rule by rule and writes each as it is read."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._names: dict[str, str] = {}
        self._first_uses: dict[str, int] = {}

    def read(self) -> str:
        rules: dict[str, str] = {}
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            name = self._name()
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANKS_AND_LINES)
            rules[name] = self._alternatives(is_nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("a rule must end with its line")
            self._skip(_BLANKS_AND_LINES)
        if "root" not in rules:
            raise ValueError("it has no rule 'root'")
        for name, place in self._first_uses.items():
            if name not in rules:
                self._at = place
                raise self._error(f"there is no rule {name!r:.80}")
        lines = [f"{self._lark_name(name)}: {body}" for name, body in rules.items()]
        return "\n".join(["%llguidance {}", f"start: {self._lark_name('root')}", *lines, ""])

    def _alternatives(self, *, is_nested: bool) -> str:
        found = [self._sequence(is_nested=is_nested)]
        while self._take("|"):
            self._skip(_BLANKS_AND_LINES)
            found.append(self._sequence(is_nested=is_nested))
        return " | ".join(found)

    def _sequence(self, *, is_nested: bool) -> str:
        blanks = _BLANKS_AND_LINES if is_nested else _BLANKS
        found: list[str] = []
        while item := self._item():
            self._skip(blanks)
            found.append(self._repeated(item, blanks))
        return " ".join(found) or '""'

    def _repeated(self, item: str, blanks: re.Pattern[str]) -> str:
        for _ in range(MAX_BOUNDS):
            bounds = self._bounds()
            if not bounds:
                return item
            item = f"({item}){bounds}"
            self._skip(blanks)
        raise self._error(f"{MAX_BOUNDS} repetitions of repetitions or more")

    def _item(self) -> str:
        """A literal, a class, a group or a name; empty where there is none of these."""
        character = self._text[self._at : self._at + 1]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._character_class()
        if character == ".":
            self._at += 1
            return r"/[\s\S]/"
        if character == "(":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            inside = self._alternatives(is_nested=True)
            self._expect(")")
            return f"({inside})"
        if _NAME.match(self._text, self._at):
            start, name = self._at, self._name()
            self._first_uses.setdefault(name, start)
            return self._lark_name(name)
        if character and character in "<!":
            raise self._error("tokens (<[id]>, <text>) are not supported; write their text")
        return ""

    def _literal(self) -> str:
        self._at += 1
        found = []
        while not self._text.startswith('"', self._at):
            found.append(json.dumps(self._character()))
        self._at += 1
        return " ".join(found) or '""'

    def _character_class(self) -> str:
        self._at += 1
        found = "[^" if self._take("^") else "["
        while not self._text.startswith("]", self._at):
            found += _in_class(self._character())
            if self._text[self._at : self._at + 2] != "-]" and self._take("-"):
                found += "-" + _in_class(self._character())
        self._at += 1
        return f"/{found}]/"

    def _character(self) -> str:
        start, text = self._at, self._text
        if start >= len(text):
            raise self._error("it ends within a text or a class of characters")
        self._at += 1
        if text[start] != "\\":
            return text[start]
        kind = text[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX_DIGITS:
            digits = text[self._at : self._at + _HEX_DIGITS[kind]]
            if re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX_DIGITS[kind]}}}", digits):
                code = int(digits, 16)
                if code < 0x110000 and not 0xD800 <= code < 0xE000:
                    self._at += len(digits)
                    return chr(code)
        elif kind in _ESCAPES:
            return _ESCAPES[kind]
        self._at = start
        raise self._error(f"{text[start : start + 2]!r} does not begin a character")

    def _bounds(self) -> str:
        """How often what stands before is repeated, as Lark has it; empty for once."""
        character = self._text[self._at : self._at + 1]
        if character and character in "*+?":
            self._at += 1
            return character
        found = _BOUNDS.match(self._text, self._at)
        if found is None:
            return ""
        least, most = int(found[1]), int(found[3] or 0)
        if max(least, most) > MAX_REPETITIONS:
            raise self._error(f"more than {MAX_REPETITIONS} repetitions")
        self._at = found.end()
        return f"{{{least},{found[3] or ''}}}" if found[2] else f"{{{least},{least}}}"

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("a rule must begin with its name")
        self._at = found.end()
        return found[0]

    def _lark_name(self, name: str) -> str:
        """One for each name: Lark has no "-", and takes what is written large for words."""
        if name not in self._names:
            self._names[name] = f"r{len(self._names)}_{name.replace('-', '_').lower()}"
        return self._names[name]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        found = blanks.match(self._text, self._at)
        assert found is not None, "there may be none"
        self._at = found.end()

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._error(f"{text!r} is missing")

    def _error(self, what: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        return ValueError(f"line {line}: {what}")


def _in_class(character: str) -> str:
    """As a class of a regular expression has it."""
    return rf"\x{{{ord(character):x}}}"
