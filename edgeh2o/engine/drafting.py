"""What drafted tokens cost, what they may lose, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..model_config import DecoderConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..model_config import ModelConfig
    from .drawing import TokenDrawer


def why_single_tokens(config: ModelConfig, device: str) -> str:
    """Why tokens of a model cannot be checked together and taken back; empty if they can."""
    if device != "cpu":
        return "on a GPU they take one token a call"
    if not isinstance(config, DecoderConfig):
        return "it is an ONNX model, whose results depend on how many tokens go together"
    return ""


def why_no_drafts(config: ModelConfig, device: str) -> str:
    """Why a model cannot write drafts, which it takes back token by token; empty if it can."""
    if not (cause := why_single_tokens(config, device)) and config.is_recurrent:
        return "it has recurrent layers, which cannot take back what they have drafted"
    return cause


class Drafter(Protocol):
    """Guesses how a text goes on. It is told of every token that is drawn, drafted or not."""

    def push(self, token: int) -> None:
        """Adds the latest token that was drawn."""

    def draft(self, most: int) -> list[int]:
        """The next tokens, as many as pay, none to ``most``."""

    def note_rows(self, first: int) -> None:
        """The model has read tokens from position ``first`` on in a call that is over.

        Of a prompt, or the latest and drafted ones.
        """

    def note_checked(self, n_drafted: int, n_checked: int) -> None:
        """So many tokens of the latest draft were looked at by the model."""

    def note_accepted(self) -> None:
        """One more of them was right, and a call is spared."""

    def counts(self) -> dict[str, Any]:
        """By field of ``GenerationStats``, what it has to add."""

    def draw_like(self, drawer: TokenDrawer) -> None:
        """``drawer`` draws the answer's tokens."""

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        """The text is ``tokens`` [n] now."""


class CallCosts:
    """How long decode calls of the model take.

    One with k drafted tokens takes as long as 1 + k * ``row_cost`` calls of one token.
    """

    FIRST_ROW_COST = 0.3
    RATE = 0.2  # of a measured time in its mean

    def __init__(self) -> None:
        self._n_single = 0
        self.single_s = 0.0
        self.row_cost = self.FIRST_ROW_COST

    @property
    def is_known(self) -> bool:
        """Whether a call of one token was measured."""
        return self._n_single > 0

    def measure(self, n_drafted: int, seconds: float) -> None:
        """Takes in what a call took."""
        if n_drafted == 0:
            self._n_single += 1
            if self._n_single > 1:  # else the machine may have done something else meanwhile
                seconds = min(seconds, 2.0 * self.single_s)
            self.single_s += max(self.RATE, 1.0 / self._n_single) * (seconds - self.single_s)
            return
        cost = (self.in_calls(seconds) - 1.0) / n_drafted
        self.row_cost += self.RATE * (min(max(cost, 0.02), 3.0 * self.row_cost) - self.row_cost)

    def in_calls(self, seconds: float) -> float:
        """A time as a number of calls of one token."""
        return seconds / max(self.single_s, 1e-9)


class Credit:
    """Limits what drafts may lose, in calls of one token.

    They are paid from a credit, which grows by what they spare and by ``ALLOWANCE`` of every
    token's time.
    """

    ALLOWANCE = 0.02

    def __init__(self, first: float, most: float) -> None:
        self._left, self._most = first, most

    @property
    def left(self) -> float:
        """Calls of one token that drafts may cost now."""
        return self._left

    def earn(self, n_calls: float) -> None:
        """Adds calls of one token that were spared, or may be lost."""
        self._left = min(self._most, self._left + n_calls)

    def pay(self, n_calls: float) -> None:
        """Takes what a draft has cost; it may have cost more than was left."""
        self._left -= n_calls


class Chances:
    """The share of guesses that were right, by class: means that forget.

    ``first`` are the shares before anything is known.
    """

    FIRST_TRIALS = 4.0  # that they count for
    MEMORY = 0.97  # what trials count for after the next one

    def __init__(self, first: Sequence[float]) -> None:
        self._trials = [self.FIRST_TRIALS] * len(first)
        self._hits = [self.FIRST_TRIALS * chance for chance in first]

    def __getitem__(self, i: int) -> float:
        return self._hits[i] / self._trials[i]

    def learn(self, i: int, *, is_right: bool) -> None:
        """Counts a guess of class ``i``."""
        self._trials[i] = self.MEMORY * self._trials[i] + 1.0
        self._hits[i] = self.MEMORY * self._hits[i] + is_right
