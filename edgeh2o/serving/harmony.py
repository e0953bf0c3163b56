"""Answers of gpt-oss, whose messages say themselves what they are (the harmony format).

``<|channel|>analysis<|message|>`` begins reasoning, ``final`` and ``commentary`` text; a message
``to=functions.NAME`` is a call with its arguments. ``<|end|>`` ends a message that others follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ..engine.stop import overlap
from .segment import Kind, Segment
from .streamed_call import StreamedCall
from .tools import ToolCall, parse_calls

MESSAGE_BEGINS = "<|channel|>"
_HEADER_ENDS = "<|message|>"
_ENDS = ("<|end|>", "<|start|>")  # of a message, one or both
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w-]+)", re.ASCII)


class HarmonyParser:
    """Takes the pieces of an answer and gives segments, as ``AnswerParser`` does.

    ``names`` are the functions that may be called.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._held = ""
        self._kind: Kind | None = None  # of the message; None within a header
        self._function = ""
        self._call: StreamedCall | None = None  # whose arguments are being told
        self._drops_blanks = False  # those behind a call

    def push(self, piece: str) -> list[Segment]:
        """Adds a piece of the answer."""
        self._held += piece
        segments: list[Segment] = []
        while self._step(segments):
            pass
        return segments

    def finish(self, *, is_cut: bool = False) -> list[Segment]:
        """What is held back at the end of the answer, or where it ``is_cut``."""
        held, self._held = self._held, ""
        if self._call is not None:
            return self._take_call(held, is_end=True)
        if self._kind is None or not (held or self._kind == "call"):
            return []  # nobody knows what would have followed a part of a header
        if self._kind == "call":
            return self._calls_of(held, is_cut=is_cut)
        held = held.lstrip() if self._drops_blanks else held
        return [Segment(self._kind, held)] if held else []

    def _step(self, segments: list[Segment]) -> bool:
        """One step; whether there may be another."""
        if self._kind is None:
            header, is_whole, rest = self._held.partition(_HEADER_ENDS)
            if is_whole:
                self._begin(header)
                self._held = rest
            return bool(is_whole)
        found = _END.search(self._held)
        if found is not None:
            before, rest = self._held[: found.start()], self._held[found.end() :]
        elif self._kind == "call" and not self._begins_object():
            return False
        else:
            n_held = max(overlap(self._held, end) for end in _ENDS)
            place = len(self._held) - n_held
            before, rest = self._held[:place], self._held[place:]
        if self._kind == "call" and self._begins_object():
            segments += self._take_call(before, is_end=found is not None)
        elif self._kind == "call":
            segments += self._calls_of(before)
        else:
            before = before.lstrip() if self._drops_blanks else before
            if before:
                segments.append(Segment(self._kind, before))
                self._drops_blanks = False
        self._held = rest
        if found is not None:
            self._kind = None
        return found is not None

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._drops_blanks = False
        self._function = recipient[1] if recipient is not None else ""
        if self._function in self._names:
            self._kind = "call"
        elif channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        else:
            self._kind = "text"

    def _begins_object(self) -> bool:
        """Whether the arguments may be told in pieces."""
        return self._call is not None or self._held.lstrip().startswith("{")

    def _take_call(self, text: str, *, is_end: bool) -> list[Segment]:
        """More of a call, and what ends it: its arguments, or the message before those do."""
        if self._call is None:
            self._call, text = StreamedCall(self._function), text.lstrip()
        call = self._call
        segments = call.push(text)
        if call.is_done or call.is_broken or is_end:
            segments.append(call.close(is_cut=not call.is_done))
            rest = call.rest.lstrip() if call.is_done else call.rest
            if rest and (call.is_done or call.is_broken):
                segments.append(Segment("text", rest))
            self._call, self._kind = None, "text"  # what else is in the message
            self._drops_blanks = not rest
        return segments

    def _calls_of(self, text: str, *, is_cut: bool = False) -> list[Segment]:
        arguments = text.strip() or ("" if is_cut else "{}")
        written = {"name": self._function, "arguments": arguments}
        if calls := parse_calls(json.dumps(written), self._names):
            return [Segment("call", call=call) for call in calls]
        if is_cut:
            return [Segment("call", call=ToolCall(self._function, text.lstrip()), is_cut=True)]
        return [Segment("text", text)]
