"""Finds stop texts in a stream of text pieces, across their borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop text appears; holds back what may become one.

    After a match ``stopped`` is true, ``found`` the stop text, and nothing more comes out. The stop
    text itself is not passed on. When several match, the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        self.found = ""

    def push(self, piece: str) -> str:
        """Adds a piece; returns the text that is now certain to lie before any stop text."""
        if self.stopped:
            return ""
        text = self._held + piece
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            start, self.found = min(matches, key=lambda match: match[0])
            self.stopped = True
            self._held = ""
            return text[:start]
        n_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """The text still held back; no stop text will complete it."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
