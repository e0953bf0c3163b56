"""Token ids of a prompt that are looked up under a lock, and made where none is held."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.prompt import Prompt


class NotTokenisedError(Exception):
    """Ids of a prompt's text from character ``start`` on are wanted, and not there yet."""

    def __init__(self, start: int) -> None:
        super().__init__(f"from character {start} on")
        self.start = start


class TokensAside:
    """The ids of ``prompt`` from several characters on; ``known`` is the prompt that has no others.

    It raises NotTokenisedError for those; ``make`` makes them, which takes long for a long prompt.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._ids: dict[int, list[int]] = {}
        self.known = replace(prompt, encode_from=self._look_up)

    def _look_up(self, start: int) -> list[int]:
        if start not in self._ids:
            raise NotTokenisedError(start)
        return self._ids[start]

    def make(self, start: int) -> None:
        """Notes the ids from that character on."""
        self._ids[start] = self._prompt.encode_from(start)
