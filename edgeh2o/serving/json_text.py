"""The text of a JSON object that is still being written, as far as it is certain."""

from __future__ import annotations

import json
import math
import re
from typing import Literal, TypeAlias

MAX_DEPTH = 64  # as bodies of requests may have it

_BLANKS = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_FIRST_HALF = re.compile(r"\\u[dD][89abAB]..")
_HALF = re.compile(r"\\u[dD][89a-fA-F]..")
_BEGUN_SECOND_HALF = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_CONSTANTS = ("true", "false", "null")

# What may come next: "first" are those after the beginning of an object or of an array.
_Next: TypeAlias = Literal["first key", "key", "colon", "value", "first item", "string", "after"]


class JsonText:
    """Takes the pieces of a text that begins with an object, and gives what of it is certain.

    That is what was written but for two things that not all readers take: line ends and other
    control characters within a text become escapes, and halves of characters U+FFFD. Numbers and
    constants come once they are whole. What follows the object, or cannot follow what was there,
    is ``rest``. With ``is_begun`` the object was begun, and a member of it is there.
    """

    def __init__(self, *, is_begun: bool = False) -> None:
        self._closers = ["}"] if is_begun else []
        self._next: _Next = "after" if is_begun else "value"
        self._is_key = False  # the text that is being written
        self._held = ""
        self.is_done = False
        self.is_broken = False

    @property
    def rest(self) -> str:
        """What was taken and not given."""
        return self._held

    def push(self, piece: str) -> str:
        """Adds a piece; what of the object has become certain."""
        text, place = self._held + piece, 0
        certain: list[str] = []
        while not (self.is_done or self.is_broken):
            end, written = self._step(text, place)
            if end == place:
                break
            certain.append(written)
            place = end
        self._held = text[place:]
        return "".join(certain)

    def _step(self, text: str, place: int) -> tuple[int, str]:
        """Where the next step ends and what it gives; the same place if more has to be there."""
        if self._next == "string":
            return self._step_string(text, place)
        blanks = _BLANKS.match(text, place)
        if blanks is not None and blanks[0]:
            return blanks.end(), blanks[0]
        if place == len(text):
            return place, ""
        character = text[place]
        if self._next in ("value", "first item"):
            return self._step_value(text, place)
        if self._next == "colon" and character == ":":
            self._next = "value"
        elif self._next in ("first key", "key") and character == '"':
            self._next, self._is_key = "string", True
        elif self._next in ("first key", "after") and character == self._closers[-1]:
            self._close()
        elif self._next == "after" and character == ",":
            self._next = "key" if self._closers[-1] == "}" else "value"
        else:
            return self._break(place)
        return place + 1, character

    def _step_value(self, text: str, place: int) -> tuple[int, str]:
        character = text[place]
        if not self._closers and character != "{":
            return self._break(place)
        if character in "{[":
            if len(self._closers) == MAX_DEPTH:
                return self._break(place)
            self._closers.append("}" if character == "{" else "]")
            self._next = "first key" if character == "{" else "first item"
        elif character == '"':
            self._next, self._is_key = "string", False
        elif self._next == "first item" and character == "]":
            self._close()
        else:
            return self._step_word(text, place)
        return place + 1, character

    def _step_word(self, text: str, place: int) -> tuple[int, str]:
        """A number or a constant."""
        found = _WORD.match(text, place)
        word = "" if found is None else found[0]
        end = place + len(word)
        if word and end == len(text):
            return place, ""
        is_number = bool(_NUMBER.fullmatch(word)) and math.isfinite(float(word))
        if not is_number and word not in _CONSTANTS:
            return self._break(place)
        self._next = "after"
        return end, word

    def _step_string(self, text: str, place: int) -> tuple[int, str]:
        if plain := _PLAIN.match(text, place):
            return plain.end(), plain[0]
        if place == len(text):
            return place, ""
        character = text[place]
        if character == '"':
            self._next = "colon" if self._is_key else "after"
            return place + 1, character
        if character != "\\":
            return place + 1, json.dumps(character)[1:-1]
        escape = _ESCAPE.match(text, place)
        if escape is None:
            is_begun = _BEGUN_ESCAPE.fullmatch(text, place)
            return (place, "") if is_begun else self._break(place)
        if pair := _PAIR.match(text, place):
            return pair.end(), pair[0]
        if _FIRST_HALF.match(escape[0]) and _BEGUN_SECOND_HALF.fullmatch(text, escape.end()):
            return place, ""
        is_half = _HALF.match(escape[0])
        return escape.end(), "\N{REPLACEMENT CHARACTER}" if is_half else escape[0]

    def _close(self) -> None:
        self._closers.pop()
        self._next = "after"
        self.is_done = not self._closers

    def _break(self, place: int) -> tuple[int, str]:
        self.is_broken = True
        return place, ""
