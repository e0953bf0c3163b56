"""Kept conversations by the budgets of their lengths: none goes on by too small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig
from edgeh2o.attention.budget_table import write_table
from edgeh2o.engine import payoff
from edgeh2o.runners.base import SessionShape
from edgeh2o.serving.shared_model import SharedModel
from edgeh2o.serving.shared_runner import SharedRunner
from tests.budget_tables import harmless_table
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine

OWN = 128  # up to 4,096 tokens; 192 in a context of 8,192
# What random weights attend to no memory set keeps.
OPTIONS = {"prefill": PrefillConfig(batch_size=1024, chunk_size=256, max_error=100)}
SIZE = 2**28


@pytest.fixture
def attention(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HeadwiseConfig:
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)  # dense would be as fast
    with LLM(serving_model) as llm:
        table = harmless_table(llm.config, OWN)
    write_table(table, tmp_path / "tiny.json")
    return HeadwiseConfig(budget_table=str(tmp_path / "tiny.json"))


def budget_of(answered: Answered) -> int:
    return int(answered.stats.attention["budget"])


def ask(
    model: Path, attention: HeadwiseConfig, *prompts: Sequence[int], **kept: object
) -> list[Answered]:
    """The answers of one server."""
    with open_engine(model, attention=attention, **OPTIONS, **kept) as engine:
        return [answer(engine, request_of(prompt)) for prompt in prompts]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_long_prompt_does_not_go_on_by_the_budgets_of_a_short_one(
    serving_model: Path, attention: HeadwiseConfig, tmp_path: Path, is_on_disk: bool
) -> None:
    """They begin alike: with the same instructions."""
    short = tokens_of(2500, seed=1)
    long = short[:2400] + tokens_of(5000, seed=2)
    (alone,) = ask(serving_model, attention, long)
    if is_on_disk:
        disk = (tmp_path / "kept", SIZE)
        ask(serving_model, attention, short, prefix_disk=disk)
        (got,) = ask(serving_model, attention, long, prefix_disk=disk)
    else:
        first, got = ask(serving_model, attention, short, long)
        assert budget_of(first) == OWN
    assert got.stats.cached_tokens == 0
    assert budget_of(got) == budget_of(alone) > OWN
    assert (got.text, got.logprobs) == (alone.text, alone.logprobs)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_conversation_that_grows_goes_on_by_its_own(
    serving_model: Path, attention: HeadwiseConfig, tmp_path: Path, is_on_disk: bool
) -> None:
    document = tokens_of(4500, seed=3)
    longer = document + tokens_of(1000, seed=4)
    disk = {"prefix_disk": (tmp_path / "kept", SIZE)} if is_on_disk else {}
    if is_on_disk:
        (first,) = ask(serving_model, attention, document, **disk)
        (second,) = ask(serving_model, attention, longer, **disk)
    else:
        first, second = ask(serving_model, attention, document, longer)
    assert second.stats.cached_tokens >= 4000
    assert budget_of(second) == budget_of(first) > OWN


def test_a_conversation_is_given_its_plan_at_once(
    serving_model: Path, attention: HeadwiseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its context, with the room for its answer, and so one cache is enough."""
    budgets = []
    start = SharedModel.start_session

    def count(self: SharedModel, attention: HeadwiseConfig, shape: SessionShape) -> SharedRunner:
        budgets.append(attention.mean_budget)
        return start(self, attention, shape)

    monkeypatch.setattr(SharedModel, "start_session", count)
    with open_engine(serving_model, attention=attention, **OPTIONS) as engine:
        first = answer(engine, request_of(tokens_of(4000, seed=5), 300))
    assert budgets == [budget_of(first)]
    assert budget_of(first) > OWN
