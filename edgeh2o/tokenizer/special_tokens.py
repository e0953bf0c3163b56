"""Finds the tokens that text can name, before anything else looks at the text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# A piece of a prompt: text still to be tokenised, or the id of a special token.
Fragment = str | int

# Vocabularies have thousands of special tokens and few beginnings: "<unused17>", "<|reserved".
_PREFIX_LENGTH = 4
_ASCII_BLANKS = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    token_id: int
    order: int


class SpecialTokens:
    """Cuts text at special tokens: the longest in bytes first, wherever it stands.

    That order, which is llama.cpp's, is not leftmost first: of "abc" and "bcde" the text "abcde"
    has the second.
    """

    __slots__ = ("_by_prefix", "_longest_first", "_strips_right")

    def __init__(
        self, tokens: Sequence[tuple[str, int]], *, strips_right: Collection[int] = ()
    ) -> None:
        """``tokens`` are (text, id); those in ``strips_right`` swallow the blanks after them."""
        self._strips_right = frozenset(strips_right)
        longest_first = sorted(tokens, key=lambda token: -len(token[0].encode("utf-8")))
        self._longest_first = [
            _Entry(text, token_id, order) for order, (text, token_id) in enumerate(longest_first)
        ]
        self._by_prefix: dict[str, list[_Entry]] = {}
        for entry in self._longest_first:
            self._by_prefix.setdefault(entry.text[:_PREFIX_LENGTH], []).append(entry)

    @property
    def texts(self) -> list[str]:
        """Texts of the tokens, the longest first."""
        return [entry.text for entry in self._longest_first]

    def cut(self, text: str) -> list[Fragment]:
        """The parts of ``text`` in order: special tokens as ids, the rest as text."""
        present = [
            entry
            for prefix, entries in self._by_prefix.items()
            if prefix in text
            for entry in entries
            if entry.text in text
        ]
        fragments: list[Fragment] = [text] if text else []
        for entry in sorted(present, key=lambda entry: entry.order):
            cut: list[Fragment] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                else:
                    cut += self._cut_at(fragment, entry)
            fragments = cut
        return fragments

    def ends(self, text: str) -> bool:
        """Whether ``text`` ends in a special token, and blanks that this swallows."""
        bare = text.rstrip(_ASCII_BLANKS) if self._strips_right else text
        return any(
            (bare if entry.token_id in self._strips_right else text).endswith(entry.text)
            for entry in self._longest_first
        )

    def _cut_at(self, text: str, entry: _Entry) -> list[Fragment]:
        first, *others = text.split(entry.text)
        if entry.token_id in self._strips_right:
            others = [part.lstrip(_ASCII_BLANKS) for part in others]
        cut: list[Fragment] = [first] if first else []
        for part in others:
            cut.append(entry.token_id)
            if part:
                cut.append(part)
        return cut
