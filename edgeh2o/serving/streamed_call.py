"""Calls whose arguments stand as JSON in an answer: they are told while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from .json_text import JsonText
from .segment import Segment
from .tools import ToolCall, may_become_call, parse_calls, parse_cut_call

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.ASCII,
)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?=\{)", re.ASCII)


def find_head(text: str, names: Sequence[str], place: int = 0) -> tuple[str, int] | None:
    """The name of the call that is an object there, and where its arguments begin.

    None where there is none, or not yet: the name has to stand before the arguments.
    """
    return _named(_HEAD.match(text, place), names)


def find_named_head(text: str, names: Sequence[str]) -> tuple[str, int] | None:
    """As ``find_head``, of a name with its arguments right behind it."""
    return _named(_NAMED.match(text), names)


def _named(found: re.Match[str] | None, names: Sequence[str]) -> tuple[str, int] | None:
    return None if found is None or found[1] not in names else (found[1], found.end())


class StreamedCall:
    """Takes what is written from the arguments of a call on, and gives its segments.

    A call ``is_done`` with its arguments, and ``is_broken`` where those turn out to be no JSON;
    ``rest`` is what follows.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._json = JsonText()
        self._is_begun = False

    @property
    def is_done(self) -> bool:
        return self._json.is_done

    @property
    def is_broken(self) -> bool:
        return self._json.is_broken

    @property
    def rest(self) -> str:
        return self._json.rest

    def push(self, piece: str) -> list[Segment]:
        """Adds a piece of the answer."""
        arguments = self._json.push(piece)
        return [self._tell(arguments, is_open=True)] if arguments else []

    def close(self, *, is_cut: bool) -> Segment:
        """The end of the call."""
        return self._tell("", is_cut=is_cut)

    def _tell(self, arguments: str, *, is_open: bool = False, is_cut: bool = False) -> Segment:
        goes_on, self._is_begun = self._is_begun, True
        call = ToolCall(self._name, arguments)
        return Segment("call", call=call, is_cut=is_cut, is_open=is_open, goes_on=goes_on)


class StreamedCalls:
    """Takes an answer from the arguments of a call on: that call, and those of its list.

    ``is_list`` says that the call is in an array, ``is_bare`` that its name stood before the
    arguments, as others may behind them. ``rest`` is what follows, once it ``is_done``.
    """

    def __init__(
        self, name: str, names: Sequence[str], *, is_list: bool = False, is_bare: bool = False
    ) -> None:
        self._names, self._is_list, self._is_bare = names, is_list, is_bare
        self.rest = ""
        self.is_done = False
        self._begin(name)

    def _begin(self, name: str) -> None:
        self._call, self._tail = StreamedCall(name), JsonText(is_begun=True)
        self._state: Literal["arguments", "tail", "behind"] = "arguments"

    def push(self, piece: str) -> list[Segment]:
        """Adds a piece of the answer."""
        self.rest += piece
        segments: list[Segment] = []
        while not self.is_done and self._step(segments):
            pass
        return segments

    def finish(self, *, is_cut: bool) -> list[Segment]:
        """What is left at the end of the answer, or where it ``is_cut``."""
        if self._state == "arguments":
            return [self._call.close(is_cut=True)]
        if self._state == "tail":
            return [self._call.close(is_cut=is_cut)]
        if not (is_cut and self._is_list) or self.is_done:
            return []
        begun = self.rest.lstrip().removeprefix(",")
        cut = parse_cut_call(begun, self._names)
        if cut is not None or may_become_call(begun, self._names):
            self.rest = ""
        return [] if cut is None else [Segment("call", call=cut, is_cut=True)]

    def _step(self, segments: list[Segment]) -> bool:
        """One step; whether there may be another."""
        if self._state == "behind":
            return self._step_named() if self._is_bare else self._step_list(segments)
        held, self.rest = self.rest, ""
        if self._state == "tail":
            self._tail.push(held)
            if not (self._tail.is_done or self._tail.is_broken):
                return False
            segments.append(self._call.close(is_cut=False))
            self.rest, self._state = self._tail.rest, "behind"
            self.is_done = self._tail.is_broken or not self._is_list
            return True
        segments += self._call.push(held)
        if self._call.is_broken:
            segments.append(self._call.close(is_cut=True))
            self.rest, self._state, self.is_done = self._call.rest, "behind", True
        elif self._call.is_done:
            self.rest, self._state = self._call.rest, "tail"
            if self._is_bare:
                segments.append(self._call.close(is_cut=False))
                self._state = "behind"
        return self._call.is_done

    def _step_named(self) -> bool:
        """There may be another name with arguments."""
        if head := find_named_head(self.rest, self._names):
            self._begin(head[0])
            self.rest = self.rest[head[1] :]
            return True
        begun = self.rest.strip()
        self.is_done = not any(name.startswith(begun) for name in self._names)
        return False

    def _step_list(self, segments: list[Segment]) -> bool:
        """A comma and another call, or the end of the list."""
        text = self.rest.lstrip()
        item = text.removeprefix(",").lstrip()
        if text.startswith("]") or (text != item and item.startswith("]")):
            self.rest, self.is_done = item.removeprefix("]"), True
        elif not text.startswith(","):
            self.is_done = bool(text)
        elif head := find_head(item, self._names):
            self._begin(head[0])
            self.rest = item[head[1] :]
            return True
        else:
            return self._take_whole(item, segments)
        return False

    def _take_whole(self, item: str, segments: list[Segment]) -> bool:
        """A call that has its name behind its arguments, or those as a text."""
        try:
            end = json.JSONDecoder(strict=False).raw_decode(item)[1]
        except (ValueError, RecursionError):
            return False
        calls = parse_calls(item[:end], self._names)
        if calls is None:
            self.is_done = True
            return False
        segments += [Segment("call", call=call) for call in calls]
        self.rest = item[end:]
        return True
