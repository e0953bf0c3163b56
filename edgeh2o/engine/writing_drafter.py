"""Drafts that are written token by token: how far they go, and what draws them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EdgeH2OError
from .drafting import CallCosts, Chances, Credit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .drawing import TokenDrawer


class DraftSteps:
    """Whether a model is to draft, and how far, by what its guesses were worth.

    A guess is of a class, by the probability that the draft model gives it; each class has the
    share of its guesses that were right. One more token is drafted while the chance that all are
    right, times the mean share, is worth the time of the step and of the row that checks it, at the
    tokens per time that drafting promises. What may be lost is limited by a credit.
    """

    # Of guesses, and how many of each class are right before anything is known.
    LEAST_PROBABILITIES = (0.2, 0.4, 0.6, 0.8, 0.95)
    FIRST_CHANCES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
    FIRST_MEAN = 0.7
    LEAST_GAIN = 1.05  # tokens in the time of one that drafting must promise
    # In calls of one token. The first is what it takes to see that drafts are wrong.
    FIRST_CREDIT, MAX_CREDIT = 3.0, 8.0
    # Tokens without a draft after which a short one is tried, if the credit allows.
    PAUSE, TRIED = 64, 2
    RATE = 0.2  # of a measured time in its mean

    def __init__(self, costs: CallCosts, step_cost: float) -> None:
        self._costs = costs
        self._chances = Chances(self.FIRST_CHANCES)
        self._mean = Chances((self.FIRST_MEAN,))
        self._gain = 1.0
        self._n_idle = 0
        self.step_cost = step_cost  # of a drafted token, in calls of the model
        self.read_cost = step_cost / 4  # of one more that is read with another
        self.credit = Credit(self.FIRST_CREDIT, self.MAX_CREDIT)

    def choose(self, n_unread: int, most: int) -> int:
        """Tokens to draft at most, 0 to ``most``, where ``n_unread`` have to be read before."""
        if not self._costs.is_known:
            return 0
        cost, mean = self.step_cost + self._costs.row_cost, self._mean[0]
        best, expected, chance = self.LEAST_GAIN, 1.0, 1.0
        pays = False
        for k in range(1, most + 1):
            chance *= mean
            expected += chance
            gain = expected / (1.0 + k * cost)
            if gain > best:
                best, pays = gain, True
        affordable = int((self.credit.left - (n_unread - 1) * self.read_cost) / cost)
        self._gain = best if pays else 1.0
        self._n_idle += 1
        if not pays:
            most = min(most, self.TRIED) if self._n_idle > self.PAUSE else 0
        length = max(0, min(most, affordable))
        if length:
            self._n_idle = 0
        return length

    def class_of(self, probability: float) -> int:
        """The class of a guess that has this probability."""
        return sum(probability >= least for least in self.LEAST_PROBABILITIES)

    def chance(self, kind: int) -> float:
        """The share of guesses of a class that were right."""
        return self._chances[kind]

    def pays_to_check(self, chance: float) -> bool:
        """Whether a token that is right with this chance is worth a row of the model's call."""
        return chance >= self._costs.row_cost * self._gain

    def pays_to_go_on(self, chance: float) -> bool:
        """Whether one more is worth a step, where all so far are right with this chance."""
        cost = self.step_cost + self._costs.row_cost
        return chance * self._mean[0] >= cost * self._gain

    def learn(self, kind: int, *, is_right: bool) -> None:
        """Counts a guess."""
        self._chances.learn(kind, is_right=is_right)
        self._mean.learn(0, is_right=is_right)

    def measure_read(self, n_tokens: int, seconds: float) -> None:
        """Takes in what reading so many tokens took, and pays for it."""
        calls = self._costs.in_calls(seconds)
        self.credit.pay(calls)
        if n_tokens == 1:
            self._approach_step(calls)
        else:
            cost = max(0.0, calls - self.step_cost) / (n_tokens - 1)
            self.read_cost += self.RATE * (cost - self.read_cost)

    def measure_step(self, seconds: float) -> None:
        """Takes in what a drafted token took, and pays for it."""
        calls = self._costs.in_calls(seconds)
        self.credit.pay(calls)
        self._approach_step(calls)

    def _approach_step(self, calls: float) -> None:
        self.step_cost += self.RATE * (min(calls, 3.0 * self.step_cost) - self.step_cost)


class WritingDrafter(ABC):
    """A ``Drafter`` that draws tokens ahead, from the random numbers of the text's next tokens.

    What it draws from has logits of ``vocab_size`` tokens; ``length`` drafts so many always, None
    as many as pay. ``name`` is what statistics call it.
    """

    def __init__(
        self, name: str, vocab_size: int, costs: CallCosts, length: int | None, step_cost: float
    ) -> None:
        self._name, self._vocab_size = name, vocab_size
        self._costs = costs
        self._always = length
        self._steps = DraftSteps(costs, step_cost)
        self._drawer: TokenDrawer | None = None
        self._twin: TokenDrawer | None = None
        # Drafted tokens that the text has not reached, and their classes.
        self._guesses: list[tuple[int, int]] = []
        self._pause = 0
        self._n_drafted = self._n_accepted = 0
        self._seconds = 0.0

    @abstractmethod
    def _step(self, token: int) -> NDArray[np.float32]:
        """Logits behind ``token``, which was drafted."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing of the text is held any more."""

    @abstractmethod
    def _give_up(self) -> None:
        """Nothing can be drawn from the logits."""

    def counts(self) -> dict[str, Any]:
        return {
            "draft_model": self._name,
            "model_drafted_tokens": self._n_drafted,
            "model_accepted_tokens": self._n_accepted,
            "draft_s": self._seconds,
        }

    def draw_like(self, drawer: TokenDrawer) -> None:
        # Where the vocabularies have different paddings nobody draws the tokens of one alone.
        self._drawer = drawer
        self._twin = drawer.twin(min(self._vocab_size, drawer.vocab_size))

    def note_checked(self, n_drafted: int, n_checked: int) -> None:
        self._n_drafted += n_checked
        self._steps.credit.pay(n_checked * self._costs.row_cost)
        if n_checked < n_drafted:  # others decode too, and share the call
            self._pause = DraftSteps.PAUSE

    def note_accepted(self) -> None:
        self._n_accepted += 1
        self._steps.credit.earn(1.0)

    def _learn(self, token: int) -> None:
        """The text goes on with ``token``."""
        if self._guesses:
            guess, kind = self._guesses.pop(0)
            self._steps.learn(kind, is_right=guess == token)
            if guess != token:
                self._guesses = []
        self._steps.credit.earn(Credit.ALLOWANCE)

    def _choose_length(self, n_unread: int, most: int) -> int:
        if self._always is None:
            return 0 if self._pause else self._steps.choose(n_unread, most)
        return min(most, self._always)

    def _measure_step(self, seconds: float) -> None:
        """So long the logits behind a drafted token took."""
        self._steps.measure_step(seconds)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Counts the block's time; an interrupt may leave half a call: then all is forgotten."""
        begun_at = time.perf_counter()
        try:
            yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._seconds += time.perf_counter() - begun_at

    def _draft_from(
        self, n_unread: int, most: int, read: Callable[[int], NDArray[np.float32] | None]
    ) -> list[int]:
        """Drafts as many tokens as pay, up to ``most``, where ``n_unread`` have to be read before.

        ``read`` does so, given how many may be drafted, and measures it: the logits after the text,
        or None where nothing can be drafted.
        """
        most = self._choose_length(n_unread, most)
        if most == 0:
            return []
        with self._at_work():
            logits = read(most)
            return [] if logits is None else self._write(logits, most)

    def _follow(self) -> TokenDrawer:
        """What draws the next tokens as those of the text will be."""
        if self._drawer is None or self._twin is None:
            raise RuntimeError("draw_like() comes before the first draft")
        self._twin.follow(self._drawer)
        return self._twin

    def _write(self, logits: NDArray[np.float32], most: int) -> list[int]:
        """Drafts up to ``most`` tokens, from the logits after the text on."""
        steps, is_free = self._steps, self._always is not None
        draft: list[int] = []
        chance = 1.0
        twin = self._follow()
        while True:
            choice = twin.process(logits[: twin.vocab_size])
            try:
                token = twin.draw(choice)
                twin.accept(token)
            except EdgeH2OError:  # of the grammar: its text is over, or too costly to follow
                return draft
            except ValueError:
                self._give_up()
                return draft
            kind = steps.class_of(_probability(choice, token))
            self._guesses.append((token, kind))
            chance *= steps.chance(kind)
            if not (is_free or steps.pays_to_check(chance)):
                return draft
            draft.append(token)
            if len(draft) == most or not (is_free or steps.pays_to_go_on(chance)):
                return draft
            begun_at = time.perf_counter()
            logits = self._step(token)
            self._measure_step(time.perf_counter() - begun_at)


def _probability(logits: NDArray[np.float32], token: int) -> float:
    """softmax(logits)[token], in float32: it only says of which class a guess is."""
    shares = np.exp(logits - logits.max())
    return float(shares[token] / shares.sum())
