"""An answer as parts that follow each other: thoughts, texts and calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .events import Piece
from .segment import Kind, Segment
from .tools import ToolCall


@dataclass(slots=True)
class Part:
    """The ``index``-th part of an answer; ``text`` is that of the arguments if it is a call.

    Those of one that ``is_cut`` are not complete. ``number`` makes ids that are unique.
    """

    index: int
    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    is_cut: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(12))


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a part: it begins, gets more text, or ends."""

    what: Literal["begin", "add", "end"]
    part: Part
    text: str = ""


class PartSequence:
    """Makes parts of the pieces of an answer; ``parts`` are those so far.

    Blanks at the end of a text are left out where a call follows, and the answer's as they are:
    what templates write between both they write themselves.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.n_reasoning_tokens = 0  # with what marks their end
        self._open: Part | None = None
        self._blanks = ""
        self._latest: Kind | None = None

    def take(self, piece: Piece) -> Iterator[Step]:
        """The steps of a piece."""
        kinds = [segment.kind for segment in piece.segments]
        is_reasoning = (kinds[0] if kinds else self._latest) == "reasoning"
        self.n_reasoning_tokens += is_reasoning and piece.token_id is not None
        self._latest = kinds[-1] if kinds else self._latest
        for segment in piece.segments:
            yield from self._add(segment)

    def finish(self) -> Iterator[Step]:
        """The steps at the end of the answer."""
        if self._blanks and all(part.call is None for part in self.parts):
            yield from self._write("text", self._blanks)
        yield from self._end()

    def collect(self, pieces: Sequence[Piece]) -> list[Part]:
        """The parts of a whole answer."""
        for piece in pieces:
            for _ in self.take(piece):
                pass
        for _ in self.finish():
            pass
        return self.parts

    def _add(self, segment: Segment) -> Iterator[Step]:
        if segment.call is not None:
            self._blanks = ""
            if not segment.goes_on:
                call = replace(segment.call, arguments="")
                yield from self._begin(Part(len(self.parts), "call", call=call))
            if segment.call.arguments:
                yield from self._write("call", segment.call.arguments)
            if segment.ends_call:
                yield from self._end_call(is_cut=segment.is_cut)
            return
        text = segment.text
        if segment.kind == "text":
            text = self._blanks + text
            self._blanks = text[len(text.rstrip()) :]
            text = text.rstrip()
        if text:
            yield from self._write(segment.kind, text)

    def _write(self, kind: Kind, text: str) -> Iterator[Step]:
        part = self._open
        if part is None or part.kind != kind:
            part = Part(len(self.parts), kind)
            yield from self._begin(part)
        part.text += text
        yield Step("add", part, text)

    def _begin(self, part: Part) -> Iterator[Step]:
        yield from self._end()
        self.parts.append(part)
        self._open = part
        yield Step("begin", part)

    def _end_call(self, *, is_cut: bool) -> Iterator[Step]:
        part = self._open
        assert part is not None and part.call is not None, "it is what has just been written"
        part.is_cut, part.call = is_cut, replace(part.call, arguments=part.text)
        yield from self._end()

    def _end(self) -> Iterator[Step]:
        if self._open is not None:
            part, self._open = self._open, None
            yield Step("end", part)
