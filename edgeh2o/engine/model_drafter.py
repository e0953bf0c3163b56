"""Drafts of a smaller model: it writes ahead what the model then checks.

It keeps a sequence of its own, which follows the text token by token: what it has written ahead and
the text does not have is taken back, what the text has and it has not is read. So nothing that
happens to the model's sequence (a new turn, a session file, a shift of the context) concerns it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EdgeH2OError
from ..runners.base import mark_where_due, plan_calls
from .drafting import CallCosts, Chances, Credit
from .transcript import count_common

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner
    from .draft_model import DraftSource
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


class ModelDrafter:
    """Drafts what a smaller model would draw after the text, from the same random numbers.

    ``prompt`` [n] are the tokens in the model's cache; ``length`` drafts so many always, None as
    many as pay. The text is read when the first draft is wanted, and of a text that is longer than
    the draft model's context nothing more is drafted.
    """

    def __init__(
        self,
        model: DraftSource,
        prompt: NDArray[np.int32],
        costs: CallCosts,
        length: int | None,
        step_cost: float = 0.3,
    ) -> None:
        self._model = model
        self._last_runner: BatchRunner | None = None  # that was lent
        self._vocab_size, self._name = model.vocab_size, str(model.path)
        self._costs = costs
        self._always = length
        self._steps = DraftSteps(costs, step_cost)
        self._drawer: TokenDrawer | None = None
        self._twin: TokenDrawer | None = None
        self._n_drafted = self._n_accepted = 0
        self._seconds = 0.0
        self._can_read = True  # all tokens are of the vocabulary
        self.begin_again(prompt)

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        self._text: list[int] = tokens.tolist()
        self._n_held: int | None = None  # tokens of the text that the sequence holds
        self._ahead: list[int] = []  # and the drafted ones that it holds behind them
        # Drafted tokens that the text has not reached, and their classes.
        self._guesses: list[tuple[int, int]] = []
        # For good, as the repeat penalty may look at tokens that have left the text.
        self._can_read = self._can_read and max(self._text, default=0) < self._vocab_size
        self._pause = 0

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

    def _follow(self) -> TokenDrawer:
        """What draws the next tokens as those of the text will be."""
        if self._drawer is None or self._twin is None:
            raise RuntimeError("draw_like() comes before the first draft")
        self._twin.follow(self._drawer)
        return self._twin

    def push(self, token: int) -> None:
        self._text.append(token)
        self._can_read = self._can_read and token < self._vocab_size
        if self._ahead and self._ahead[0] == token and self._n_held is not None:
            self._ahead.pop(0)
            self._n_held += 1
        else:
            self._ahead = []
        if self._guesses:
            guess, kind = self._guesses.pop(0)
            self._steps.learn(kind, is_right=guess == token)
            if guess != token:
                self._guesses = []
        self._steps.credit.earn(Credit.ALLOWANCE)

    def note_checked(self, n_drafted: int, n_checked: int) -> None:
        self._n_drafted += n_checked
        self._steps.credit.pay(n_checked * self._costs.row_cost)
        if n_checked < n_drafted:  # others decode too, and share the call
            self._pause = DraftSteps.PAUSE

    def note_accepted(self) -> None:
        self._n_accepted += 1
        self._steps.credit.earn(1.0)

    def draft(self, most: int) -> list[int]:
        most = min(most, self._model.max_context - len(self._text))
        self._pause = max(0, self._pause - 1)
        if not self._can_read or most < 1:
            return []
        with self._model.lend() as runner:
            if runner is None:
                return []
            if runner is not self._last_runner:  # what it holds is not known
                self._last_runner, self._n_held, self._ahead = runner, None, []
            return self._draft(most)

    @property
    def _runner(self) -> BatchRunner:
        """The one that is lent."""
        if self._last_runner is None:
            raise RuntimeError("there is a runner only while one is lent")
        return self._last_runner

    def _draft(self, most: int) -> list[int]:
        is_first = self._n_held is None
        n_unread = len(self._text) - self._count_held()
        if self._always is None:
            most = 0 if self._pause else self._steps.choose(1 if is_first else n_unread, most)
        else:
            most = min(most, self._always)
        if most == 0:
            return []
        begun_at = time.perf_counter()
        try:
            logits = self._read()
            if not is_first:
                self._steps.measure_read(n_unread, time.perf_counter() - begun_at)
            return self._write(logits, most)
        except BaseException:  # an interrupt may have left half a call
            self._forget()
            raise
        finally:
            self._seconds += time.perf_counter() - begun_at

    def _count_held(self) -> int:
        """Tokens of the text in the sequence that are not to be read again."""
        if self._n_held is None:
            self._n_held = count_common(self._runner.token_ids, self._text)
        # The logits after the last one are needed.
        return min(self._n_held, len(self._text) - 1)

    def _forget(self) -> None:
        self._runner.reset()
        self._n_held, self._ahead, self._guesses = 0, [], []

    def _read(self) -> NDArray[np.float32]:
        """Reads what is new of the text; the logits after its last token."""
        runner, n_held, end = self._runner, self._count_held(), len(self._text)
        if runner.position != n_held:
            n_held = runner.find_mark(n_held)
            runner.rewind(n_held)
        tokens = np.array(self._text[n_held:], np.int32)
        logits: NDArray[np.float32] | None = None
        if len(tokens) <= runner.max_decode_tokens:
            logits = runner.decode_batch(tokens)[-1]
            runner.accept(len(tokens) - 1)
        else:
            for call in plan_calls(n_held, end, runner):
                mark_where_due(runner)
                part = tokens[call.start - n_held : call.stop - n_held]
                logits = runner.prefill(part, is_last=call.stop == end, stays_open=True)
            mark_where_due(runner)
        if logits is None:
            raise ValueError("the draft model returned no logits")
        self._n_held, self._ahead, self._guesses = end, [], []
        return logits

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
            except ValueError:  # logits that are no numbers: nothing can be drawn from them
                self._can_read = False
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
            logits = self._runner.decode(token)
            self._ahead.append(token)
            steps.measure_step(time.perf_counter() - begun_at)


def _probability(logits: NDArray[np.float32], token: int) -> float:
    """softmax(logits)[token], in float32: it only says of which class a guess is."""
    shares = np.exp(logits - logits.max())
    return float(shares[token] / shares.sum())
