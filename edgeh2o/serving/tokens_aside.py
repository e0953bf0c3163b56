"""Token ids of a prompt that are looked up under a lock, and made where none is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..engine.prompt import Prompt

T = TypeVar("T")


class _NotTokenisedError(Exception):
    """Ids of a prompt's text from character ``start`` on are wanted, and not there yet."""

    def __init__(self, start: int) -> None:
        super().__init__(f"from character {start} on")
        self.start = start


def tokenise_aside(prompt: Prompt, use: Callable[[Prompt], T]) -> T:
    """What ``use`` gives, which locks and looks ids of the prompt up; it makes none.

    Where it lacks those from some character on, it ends by an error, which is meant for here, and
    is called again once they are there.
    """
    known = {0: prompt.encode_from(0)}

    def look_up(start: int) -> list[int]:
        if start not in known:
            raise _NotTokenisedError(start)
        return known[start]

    while True:
        try:
            return use(replace(prompt, encode_from=look_up))
        except _NotTokenisedError as wanted:
            start = wanted.start
        known[start] = prompt.encode_from(start)
