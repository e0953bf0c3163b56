"""A piece of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .tools import ToolCall

Kind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Segment:
    """``call`` is set for one of kind "call", ``text`` for the others.

    The arguments of a call that ``is_cut`` are not complete.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    is_cut: bool = False
