"""What drafts of a model may cost: guesses that are never right, slow ones, shared calls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.engine._sampler import Sampler
from edgeh2o.engine.drafting import CallCosts, Credit
from edgeh2o.engine.drawing import TokenDrawer
from edgeh2o.engine.model_drafter import ModelDrafter
from edgeh2o.engine.speculation import SpeculativeDecoder
from edgeh2o.engine.writing_drafter import DraftSteps
from tests.engine.drafted import SAMPLINGS, TogetherRunner


@pytest.mark.parametrize("options", SAMPLINGS)
def test_a_twin_draws_what_its_sampler_will(options: dict[str, Any]) -> None:
    """Also one of a smaller vocabulary, where the other tokens have no chance."""
    rng = np.random.default_rng(0)
    settings = {name: value for name, value in options.items() if not name.endswith("last_n")}
    if "dry_penalty_last_n" in options:
        settings |= {"dry_window_size": options["dry_penalty_last_n"], "breakers": [(7,), (5, 55)]}
    sampler = Sampler(60, **settings, window_size=options.get("repeat_last_n", 0) % 50, seed=3)
    for n_tokens in (60, 50):
        twin = sampler.twin(n_tokens)
        for _ in range(40):
            logits = rng.normal(size=60).astype(np.float32) * 3
            logits[50:] = -np.inf
            twin.follow(sampler)
            guess = twin.sample(logits[:n_tokens])
            token = sampler.sample(logits)
            assert guess == token
            sampler.accept(token)
    if settings.get("repeat_penalty", 1.0) != 1.0:
        sampler.accept(55)
        with pytest.raises(ValueError, match="token id 55 is outside the vocabulary of 50"):
            sampler.twin(50).follow(sampler)
    with pytest.raises(ValueError, match="different numbers of recent tokens"):
        Sampler(60, temperature=0.0, repeat_penalty=2.0, window_size=3).follow(sampler)


class _Draft:
    """What a ``ModelDrafter`` needs of a ``DraftModel``."""

    vocab_size, path = 64, Path("draft")

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.max_context = runner.max_context

    def lend(self) -> Any:
        return nullcontext(self.runner)


def _simulate(
    chance: float, *, row_cost: float = 0.1, step_cost: float = 0.2, n_tokens: int = 300
) -> tuple[float, DraftSteps, float]:
    """Time per token, in calls of one token, where every guess is right with the same chance.

    And the tokens per call. The draft model is as sure of every guess, whatever they are worth.
    """
    rng, costs = np.random.default_rng(1), CallCosts()
    steps = DraftSteps(costs, step_cost=0.3)
    time, n_done, n_calls, n_unread, kind = 0.0, 0, 0, 1, 4
    while n_done < n_tokens:
        most, draft, likely = steps.choose(n_unread, 15), 0, 1.0
        seconds = 1.0
        while draft < most:
            step = step_cost + (n_unread - 1) * step_cost / 4
            if draft == 0:
                steps.measure_read(n_unread, step * 1e-3)
            else:
                steps.measure_step(step * 1e-3)
            time, n_unread = time + step, 1
            likely *= steps.chance(kind)
            if not steps.pays_to_check(likely):
                break
            draft += 1
            if not steps.pays_to_go_on(likely):
                break
        seconds += row_cost * draft
        costs.measure(draft, seconds * 1e-3)
        steps.credit.pay(draft * costs.row_cost)
        hits = (rng.random(draft) < chance).tolist()
        n_right = [*hits, False].index(False)
        for i in range(min(n_right + 1, draft)):
            steps.learn(kind, is_right=i < n_right)
        steps.credit.earn(n_right + Credit.ALLOWANCE * (n_right + 1))
        time, n_done, n_calls = time + seconds, n_done + n_right + 1, n_calls + 1
        n_unread = n_right + 1 if draft == 0 else 1
        n_unread = 1 if draft else n_unread
    return time / n_done, steps, n_done / n_calls


@pytest.mark.parametrize("step_cost", [0.02, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.1])
def test_drafts_that_are_never_right_cost_little(chance: float, step_cost: float) -> None:
    """What is lost is a few calls in the beginning, and 2 % of the time of an answer."""
    time, steps, _ = _simulate(chance, step_cost=step_cost)
    assert time < 1.0 + Credit.ALLOWANCE + (DraftSteps.FIRST_CREDIT + 1.5) / 300
    assert steps.choose(1, 15) <= DraftSteps.TRIED


def test_drafts_that_are_right_pay() -> None:
    time, steps, per_call = _simulate(0.97, row_cost=0.1, step_cost=0.05)
    assert time < 0.4
    assert per_call > 4
    assert steps.step_cost == pytest.approx(0.05, rel=0.1)
    # A draft model as slow as the model is not used, however good it is.
    time, steps, per_call = _simulate(1.0, row_cost=0.1, step_cost=1.0)
    assert time < 1.03
    assert per_call < 1.1


def test_a_shared_call_pauses_the_drafts() -> None:
    """Where others decode too only the first token of a call is looked at."""
    runner, draft_runner = TogetherRunner([5] * 90), TogetherRunner([5] * 400, max_context=400)
    draft_runner.token_ids = []  # type: ignore[attr-defined]
    draft_runner.rewind = lambda position: setattr(draft_runner, "position", position)  # type: ignore[attr-defined]
    draft_runner.find_mark = lambda position: position  # type: ignore[attr-defined]
    costs = CallCosts()
    drafter = ModelDrafter(_Draft(draft_runner), np.array([1, 2]), costs, None)  # type: ignore[arg-type]
    decoder = SpeculativeDecoder(runner, 90, [drafter], costs)
    decoder.draw_like(TokenDrawer(Sampler(64, temperature=0.0)))
    for _ in range(3):
        decoder.advance(5)
    assert draft_runner.calls
    n_calls = len(draft_runner.calls)
    drafter.note_checked(3, 0)
    for _ in range(20):
        decoder.advance(5)
    assert len(draft_runner.calls) == n_calls
