"""A piece of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .tools import ToolCall

Kind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Segment:
    """``call`` is set for one of kind "call", ``text`` for the others.

    A call may come in several segments, whose arguments follow each other: one that ``goes_on``
    with the call before, and one that ``is_open``, which others go on with. The arguments of a
    call that ``is_cut``, which its last segment says, are not complete.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    is_cut: bool = False
    is_open: bool = False
    goes_on: bool = False

    @property
    def ends_call(self) -> bool:
        """Whether a call is there with it, all of it."""
        return self.call is not None and not self.is_open


def join_calls(segments: Iterable[Segment]) -> list[ToolCall]:
    """The calls of an answer, each of which may be several of its segments."""
    calls: list[ToolCall] = []
    for segment in segments:
        if segment.call is None:
            continue
        begun = calls.pop().arguments if segment.goes_on else ""
        calls.append(ToolCall(segment.call.name, begun + segment.call.arguments))
    return calls
