"""What guesses cost in steps that answers share, and what wrong ones may lose."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o.engine.lookup import DraftLength
from edgeh2o.serving.step_costs import StepCosts


def simulate(
    chances: list[float], row_cost: float, *, n_tokens: int = 400, match: int = 5
) -> tuple[float, float, StepCosts]:
    """Answers of so many tokens each, whose guesses are right with such chances.

    In steps of one token, a token's share of the time and what it would be without guesses: of all
    the time until the last answer is written.
    """
    rng, costs = np.random.default_rng(1), StepCosts()
    lengths = [DraftLength(costs) for _ in chances]
    left = [n_tokens] * len(chances)
    seconds = plain = 0.0
    while any(left):
        writing = [i for i, n in enumerate(left) if n]
        guesses = {i: lengths[i].choose(match, min(15, left[i] - 1)) for i in writing}
        n_guesses = sum(guesses.values())
        step = 1.0 + row_cost * (len(writing) - 1 + n_guesses)
        seconds += step
        noise = 1.0 + 0.05 * rng.standard_normal()
        costs.measure_step(len(writing), n_guesses, step * noise)
        for i in writing:
            lengths[i].credit.pay(guesses[i] * costs.row_cost)
            for k in range(guesses[i] + 1):
                is_right = bool(rng.random() < chances[i])
                lengths[i].learn(match, is_right=is_right)
                left[i] -= 1
                if k < guesses[i] and not is_right:
                    break
                if k < guesses[i]:
                    lengths[i].credit.earn(1.0)
    plain = n_tokens * (1.0 + row_cost * (len(chances) - 1))
    return seconds, plain, costs


@pytest.mark.parametrize("n_answers", [1, 2, 4, 8])
@pytest.mark.parametrize("row_cost", [0.05, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3])
def test_wrong_guesses_cost_three_percent_at_most(
    n_answers: int, row_cost: float, chance: float
) -> None:
    seconds, plain, _ = simulate([chance] * n_answers, row_cost)
    assert seconds < 1.03 * plain


@pytest.mark.parametrize("n_answers", [1, 2, 4])
def test_right_guesses_make_all_answers_faster(n_answers: int) -> None:
    seconds, plain, _ = simulate([0.95] * n_answers, 0.07)
    assert seconds < 0.5 * plain


def test_a_chat_beside_an_edit_loses_nothing() -> None:
    seconds, plain, _ = simulate([0.95, 0.0], 0.07)
    assert seconds < 1.03 * plain


def test_costs_are_counted_in_tokens_of_all() -> None:
    costs = StepCosts()
    assert not costs.is_known
    for _ in range(40):
        for n_guesses in (0, 2, 8):
            costs.measure_step(4, n_guesses, 2.0 + 0.1 * n_guesses)
    assert costs.single_s == pytest.approx(0.5, rel=0.01)
    assert costs.row_cost == pytest.approx(0.2, rel=0.05)
    costs.measure_step(1, 0, 1.0)
    assert costs.is_known
    assert costs.row_cost == pytest.approx(0.1, rel=0.05)
    assert costs.in_calls(3.0) == pytest.approx(3.0)


def test_a_time_that_was_of_something_else_is_forgotten() -> None:
    costs = StepCosts()
    costs.measure_step(2, 0, 1.0)
    for _ in range(5):
        costs.measure_step(2, 3, 60.0)
    assert costs.row_cost > 0.5
    for _ in range(200):
        costs.measure_step(2, 0, 1.0)
    assert costs.row_cost < 0.4
