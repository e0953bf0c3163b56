"""What guesses cost in a decode step that several answers share."""

from __future__ import annotations

from ..engine.drafting import CallCosts


class StepCosts(CallCosts):
    """How long steps take, of any number of answers: ``CallCosts`` that all of them share.

    A step of b answers with k guesses takes a[b] + k * r seconds: a guess is one more row of the
    products, whoever makes it, and everybody waits for it. So its cost is counted in tokens that
    all answers together write in that time, r * b / a[b], and a right guess spares one of them:
    what pays for all is drafted, and what wrong guesses take is limited for all.
    a and r follow the measured times by normalised least mean squares
    (B. Widrow, M. E. Hoff, "Adaptive Switching Circuits", 1960).
    """

    FIRST_SHARE = 0.2  # of a row in a step of one, before it is measured
    LEAST_SHARE = 0.02
    # Back to the first share, by so much a step without guesses: a time that was none of theirs
    # would else end them for good.
    RECOVERY = 0.02

    def __init__(self) -> None:
        super().__init__()
        self._n_answers = 1  # of the latest step
        self._steps_s: dict[int, float] = {}  # a, by b
        self._row_s: float | None = None
        self._n_guessed = 0  # steps with guesses

    @property
    def is_known(self) -> bool:
        """Whether steps of so many answers as the latest had were measured."""
        return self._n_answers in self._steps_s

    def measure(self, n_drafted: int, seconds: float) -> None:
        """An answer's call says nothing: it waits for others."""

    def measure_step(self, n_answers: int, n_guesses: int, seconds: float) -> None:
        """Takes in what a step took: ``n_guesses`` of all answers."""
        if self._row_s is None:
            n_more = n_answers + n_guesses - 1
            self._row_s = self.FIRST_SHARE * seconds / (1.0 + self.FIRST_SHARE * n_more)
        step_s = self._steps_s.get(n_answers)
        if step_s is None:
            step_s = max(seconds - n_guesses * self._row_s, 0.25 * seconds)
        else:
            expected = step_s + n_guesses * self._row_s
            # The machine may have done something else meanwhile.
            error = min(max(seconds, 0.5 * expected), 2.0 * expected) - expected
            self._n_guessed += n_guesses > 0
            rate = max(self.RATE, 1.0 / (1.0 + self._n_guessed)) if n_guesses else self.RATE
            share = rate * error / (1.0 + n_guesses * n_guesses)
            step_s += share
            self._row_s += share * n_guesses
        one_s = step_s / (1.0 + self.FIRST_SHARE * (n_answers - 1))  # of one answer, about
        self._row_s = max(self._row_s, self.LEAST_SHARE * one_s)
        if n_guesses == 0:
            above = max(0.0, self._row_s - self.FIRST_SHARE * one_s)
            self._row_s -= self.RECOVERY * above
        self._steps_s[n_answers] = step_s
        self._n_answers = n_answers
        self.single_s = step_s / n_answers
        self.row_cost = self._row_s / self.single_s
