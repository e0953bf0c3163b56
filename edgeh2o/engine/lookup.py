"""Prompt lookup: the next tokens are guessed from the text so far.

An answer often repeats the prompt or itself: names, code, whole sentences. The last tokens are
looked up in the text; what followed them there is a draft.
(A. Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._ngrams import NgramIndex
from .drafting import CallCosts, Chances, Credit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .drawing import TokenDrawer

# Tokens of a prompt from which on "auto" looks up: shorter ones hold little to repeat.
MIN_PROMPT_TOKENS = 256
# Tokens of a match: at least those that are looked up; at most so many are counted, because how far
# it reaches back tells how far it goes on.
MIN_MATCH, MAX_MATCH = 2, 16


class DraftLength:
    """How many tokens to draft, by how often guesses were right and what a drafted token costs.

    A match of so many tokens is of a class; each has the share of its guesses that were right, over
    all generated tokens, drafted or not: looking up costs next to nothing. The length is that with
    the most tokens per time, as far as the credit goes.
    """

    # Before anything is known: of matches of 2, 3, 4 to 7, 8 to 15, and more tokens.
    FIRST_CHANCES = (0.3, 0.4, 0.6, 0.75, 0.9)
    LEAST_GAIN = 1.05  # tokens in the time of one that a draft must promise
    # In calls of one token.
    FIRST_CREDIT, MAX_CREDIT = 0.6, 5.0

    def __init__(self, costs: CallCosts) -> None:
        self._costs = costs
        self._chances = Chances(self.FIRST_CHANCES)
        self.credit = Credit(self.FIRST_CREDIT, self.MAX_CREDIT)

    def choose(self, match: int, most: int) -> int:
        """Tokens to draft after a match of so many, 0 to ``most``."""
        if match < MIN_MATCH or not self._costs.is_known:
            return 0
        row_cost = self._costs.row_cost
        best, length, expected, chance = self.LEAST_GAIN, 0, 1.0, 1.0
        for k in range(1, min(most, int(self.credit.left / row_cost)) + 1):
            chance *= self.chance(match + k - 1)
            expected += chance
            gain = expected / (1.0 + k * row_cost)
            if gain > best:
                best, length = gain, k
        return length

    def chance(self, match: int) -> float:
        """The share of matches of so many tokens whose next token was right."""
        return self._chances[_class_of(match)]

    def learn(self, match: int, *, is_right: bool) -> None:
        """Counts a generated token: what it was after a match of so many, 0 for none."""
        self.credit.earn(Credit.ALLOWANCE)
        if match >= MIN_MATCH:
            self._chances.learn(_class_of(match), is_right=is_right)


def _class_of(match: int) -> int:
    return min(max(match, 2) - 2, 1) if match < 4 else min(match.bit_length(), 5) - 1


class PromptLookup:
    """Drafts what followed the last tokens where they stood before.

    ``length`` drafts so many tokens always, None as many as pay; texts have ``capacity`` tokens at
    most.
    """

    def __init__(
        self, prompt: NDArray[np.int32], capacity: int, costs: CallCosts, length: int | None
    ) -> None:
        self._prompt, self._capacity = prompt, capacity
        self._costs = costs
        self._index: NgramIndex | None = None
        self._always = length
        self._lengths = DraftLength(costs)
        self._start = self._match = 0

    def push(self, token: int) -> None:
        if self._index is None:  # not before the first token is out
            self._index = NgramIndex(self._capacity)
            self._index.extend(self._prompt)
            self._start, self._match = self._index.find(MAX_MATCH)
        is_right = self._match > 0 and self._index.at(self._start) == token
        self._lengths.learn(self._match, is_right=is_right)
        self._index.push(token)
        self._start, self._match = self._index.find(MAX_MATCH)

    def draft(self, most: int) -> list[int]:
        if self._index is None or not self._match or most < 1:
            return []
        if self._always is None:
            length = self._lengths.choose(self._match, most)
        else:
            length = min(most, self._always)
        return self._index.predict(self._start, length) if length else []

    def note_rows(self, first: int) -> None:
        """It looks at the text alone."""

    def note_checked(self, n_drafted: int, n_checked: int) -> None:
        self._lengths.credit.pay(n_checked * self._costs.row_cost)

    def note_accepted(self) -> None:
        self._lengths.credit.earn(1.0)

    def counts(self) -> dict[str, Any]:
        return {}

    def draw_like(self, drawer: TokenDrawer) -> None:
        """Guesses are what the text says, whatever is drawn."""

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        self._prompt, self._index = tokens, None
