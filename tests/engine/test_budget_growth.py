"""Long prompts get larger budgets than a table gives short ones, chats those of their context."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig, SamplingParams, UsageError
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.budget_table import BudgetTable, table_path, write_table
from edgeh2o.attention.head_budgets import grow_budgets
from edgeh2o.config import RuntimeConfig
from edgeh2o.engine import payoff
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.engine.memory_fit import find_largest_context, session_sizes
from edgeh2o.engine.payoff import choose_reading
from edgeh2o.engine.plan import RunPlan
from edgeh2o.engine.saved_plan import fingerprint_of, plan_of_fingerprint
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.runners.base import SessionShape
from tests.budget_tables import harmless_table
from tests.engine.unknown_models import random_prompt

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
FEW_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# What random weights attend to no memory set keeps.
UNGUARDED = PrefillConfig(max_error=100)
OWN = 128  # up to 4,096 tokens; 192 at 8,192
LONG, LONG_BUDGET = 8192, 192


@pytest.fixture
def path(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # However short: tests/engine/test_payoff.py has the lengths from which sparse pays.
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)
    return path


@pytest.fixture
def table(path: Path) -> BudgetTable:
    """Heads that err less with every level."""
    with LLM(path) as llm:
        return harmless_table(llm.config, OWN)


@pytest.fixture
def by_table(table: BudgetTable, tmp_path: Path) -> HeadwiseConfig:
    write_table(table, tmp_path / "tiny.json")
    return HeadwiseConfig(budget_table=str(tmp_path / "tiny.json"))


def load(path: Path, attention: SparseAttentionConfig | None = None, **options: int) -> LLM:
    return LLM(path, attention=attention, prefill=UNGUARDED, **options)


def plan_of(llm: LLM, attention: SparseAttentionConfig) -> RunPlan:
    return RunPlan.of(llm.config, attention, UNGUARDED, RuntimeConfig())


def test_a_prompt_is_read_by_the_budget_of_its_length(
    path: Path, table: BudgetTable, by_table: HeadwiseConfig
) -> None:
    pairs = {}
    with load(path, by_table) as llm:
        for n_tokens, budget in ((3000, OWN), (LONG, LONG_BUDGET), (3000, OWN)):
            stats = llm.generate(random_prompt(llm, n_tokens), ONE_TOKEN).stats
            assert (stats.attention["budget"], stats.attention["table"]) == (budget, "file")
            assert f"budget {budget}" in stats.format_table()
            pairs[budget] = stats.pairs_computed
    of_heads = HeadwiseConfig(
        budgets=grow_budgets(table, OWN, LONG_BUDGET), by_query_head=table.n_heads > 0
    )
    for attention in (of_heads, replace(by_table, budget=OWN)):
        with load(path, attention) as llm:
            stats = llm.generate(random_prompt(llm, LONG), ONE_TOKEN).stats
            assert (stats.pairs_computed == pairs[LONG_BUDGET]) == (attention is of_heads)
            assert stats.pairs_computed <= pairs[LONG_BUDGET]


def test_evaluations_read_as_prompts_are_read(path: Path, by_table: HeadwiseConfig) -> None:
    with load(path, by_table) as llm:
        prompt = random_prompt(llm, LONG)
        stats = llm.generate(prompt, ONE_TOKEN).stats
        runner = llm.start_runner(LONG)
        prefill_prompt(runner, prompt)
        assert runner.pairs_computed == stats.pairs_computed
        assert llm.report_attention(LONG) == stats.attention
        # With room for more than the prompt.
        runner = llm.start_runner(LONG + 100, n_prompt=LONG)
        prefill_prompt(runner, prompt)
        assert runner.pairs_computed == stats.pairs_computed
        own = llm.start_runner(LONG, attention=replace(by_table, budget=OWN))
        prefill_prompt(own, prompt)
        assert own.pairs_computed < runner.pairs_computed
        assert llm.report_attention(4096)["budget"] == OWN


def test_a_chat_goes_by_its_context(path: Path, by_table: HeadwiseConfig) -> None:
    with load(path, by_table, context_size=LONG) as llm:
        stats = llm.generate(random_prompt(llm, 400), ONE_TOKEN, keep_cache=True).stats
        assert stats.attention["budget"] == LONG_BUDGET
        stats = llm.generate(random_prompt(llm, 400), ONE_TOKEN).stats  # no chat
        assert stats.attention["budget"] == OWN


def test_a_chat_that_grows_keeps_its_budget_unless_most_of_it_is_new(
    path: Path, by_table: HeadwiseConfig
) -> None:
    with load(path, by_table) as llm:
        prompt = random_prompt(llm, LONG)
        stats = llm.generate(prompt[:3000], ONE_TOKEN, keep_cache=True).stats
        assert stats.attention["budget"] == OWN
        stats = llm.generate(prompt[:5000], ONE_TOKEN, keep_cache=True).stats
        assert (stats.attention["budget"], stats.cached_tokens) == (OWN, 3000)
        llm.forget()
        llm.generate(prompt[:3000], ONE_TOKEN, keep_cache=True)
        grown = llm.generate(prompt[:8000], FEW_TOKENS, keep_cache=True)
        assert grown.stats.attention["budget"] == LONG_BUDGET  # of the context, 8,192
        assert grown.stats.cached_tokens == 0
    with load(path, by_table, context_size=LONG) as llm:
        whole = llm.generate(prompt[:8000], FEW_TOKENS, keep_cache=True)
        assert whole.token_ids == grown.token_ids
        assert whole.stats.pairs_computed == grown.stats.pairs_computed


def test_a_beginning_with_larger_budgets_serves_a_shorter_prompt(
    path: Path, by_table: HeadwiseConfig
) -> None:
    with load(path, by_table) as llm:
        prompt = random_prompt(llm, LONG)
        llm.generate(prompt, ONE_TOKEN, keep_cache=True)
        other = np.concatenate([prompt[:2100], random_prompt(llm, 2500, seed=1)])
        stats = llm.generate(other, ONE_TOKEN, keep_cache=True).stats
        assert stats.cached_tokens == 2048
        assert stats.attention["budget"] >= LONG_BUDGET


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_session_file_goes_on_with_its_budget(
    path: Path, table: BudgetTable, by_table: HeadwiseConfig, tmp_path: Path, is_by_hand: bool
) -> None:
    write_table(table, table_path(table.fingerprint))
    attention = by_table if is_by_hand else None
    file = tmp_path / "saved"
    with load(path, attention) as llm:
        prompt = random_prompt(llm, LONG)
        made = llm.generate(prompt[:7000], FEW_TOKENS, keep_cache=True)
        budget = made.stats.attention["budget"]
        assert budget > OWN
        llm.save_session(file)
        expected = llm.generate(prompt, FEW_TOKENS, keep_cache=True)
    with load(path, attention) as llm:
        llm.load_session(file)
        result = llm.generate(prompt, FEW_TOKENS, keep_cache=True)
        assert result.stats.cached_tokens == expected.stats.cached_tokens >= 6000
        assert result.stats.attention["budget"] == budget
        assert result.token_ids == expected.token_ids
        # What begins anew goes by its own length.
        stats = llm.generate(prompt[:3000], ONE_TOKEN).stats
        assert stats.attention["budget"] == OWN
    with (
        load(path, replace(by_table, budget=OWN)) as llm,
        pytest.raises(UsageError, match=f"budget {budget}; this run has {OWN}|made with attention"),
    ):
        llm.load_session(file)


def test_a_file_of_other_budgets_is_not_taken_for_one_of_a_longer_prompt(
    path: Path, table: BudgetTable, by_table: HeadwiseConfig, tmp_path: Path
) -> None:
    file = tmp_path / "saved"
    with load(path, by_table) as llm:
        llm.generate(random_prompt(llm, 7000), ONE_TOKEN, keep_cache=True)
        llm.save_session(file)
    n_heads = len(table.errors)
    rows = tuple(tuple((1 + 99 * (i % 2)) / level for level in LEVELS) for i in range(n_heads))
    write_table(replace(table, errors=rows), tmp_path / "tiny.json")
    with load(path, by_table) as llm, pytest.raises(UsageError, match="made with attention"):
        llm.load_session(file)


def test_plans_of_files_are_those_of_the_table(path: Path, by_table: HeadwiseConfig) -> None:
    with load(path) as llm:
        plan = plan_of(llm, by_table)
        for n_tokens in (100, LONG, 16384):
            longer = plan.for_length(n_tokens)
            saved = json.loads(json.dumps(fingerprint_of(longer, llm.model)))
            found = plan_of_fingerprint(plan, saved, llm.model)
            assert found is not None and found.rounding_for(n_tokens) == longer
        for name, value in (("budget", LONG_BUDGET + 64), ("budget", "x"), ("local", 3)):
            other = {**saved, "attention": {**saved["attention"], name: value}}
            assert plan_of_fingerprint(plan, other, llm.model) is None
        assert plan_of_fingerprint(plan, {**saved, "model": "x"}, llm.model) is None
        assert plan_of_fingerprint(plan, {}, llm.model) is None
        # Budgets that were asked for are no others'.
        asked_for = plan_of(llm, replace(by_table, budget=OWN))
        assert plan_of_fingerprint(asked_for, saved, llm.model) is None


def test_the_largest_context_that_fits_has_its_own_budgets(
    path: Path, by_table: HeadwiseConfig
) -> None:
    seen = {}

    def estimate(attention: SparseAttentionConfig, shape: SessionShape) -> dict[str, int]:
        seen[shape.max_context] = attention.mean_budget
        return {"kv_cache": shape.max_context}

    with load(path) as llm:
        plan = plan_of(llm, by_table).for_length(16384)
        sizes = session_sizes(plan, plan.shape(16384), estimate)
        assert find_largest_context(16384, sizes, 9000) == 8960
        short = plan_of(llm, by_table)
        assert all(
            budget == short.for_length(n).attention.mean_budget for n, budget in seen.items()
        )
        assert seen[16384] == 320 and min(seen) > 4096


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_device_gets_the_budgets(
    path: Path, by_table: HeadwiseConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path) as llm:
        plan = replace(plan_of(llm, by_table), device=device)
        assert choose_reading(plan, llm.model, 1000) is plan
        assert choose_reading(plan, llm.model, 4096) == plan.rounding_for(4096)
        chosen = choose_reading(plan, llm.model, LONG)
        assert chosen.attention.mean_budget == LONG_BUDGET
        assert chosen == plan.for_length(LONG) == chosen.for_length(LONG)
        assert chosen.for_length(1000) == plan
        # Dense where that is as fast, of what is known here.
        monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)
        chosen = choose_reading(plan, llm.model, LONG)
        assert chosen.attention.reads_all == (device == "cpu")


def test_the_guard_is_that_of_the_settings(path: Path, table: BudgetTable) -> None:
    """The budget that was chosen is none that was asked for."""
    write_table(table, table_path(table.fingerprint))
    with LLM(path) as llm:
        for attention in (HeadwiseConfig(), HeadwiseConfig(max_loss=0.5)):
            plan = RunPlan.of(llm.config, attention, PrefillConfig(), RuntimeConfig())
            limits = {plan.for_length(n).shape(n).error_limit for n in (4096, LONG)}
            assert len(limits) == 1 and math.isfinite(limits.pop())


def test_the_rest_of_a_first_prompt_goes_by_its_length(path: Path) -> None:
    with LLM(
        path,
        prefill=PrefillConfig(batch_size=1024, chunk_size=256, max_error=100),
        attention=HeadwiseConfig(max_past=0),
    ) as llm:
        stats = llm.generate(random_prompt(llm, 9000), ONE_TOKEN).stats
        assert stats.note == "the first 1,024 tokens read dense and profiled"
        assert (stats.attention["table"], stats.attention["budget"]) == ("profile (1 prompt)", 1664)
        again = llm.generate(random_prompt(llm, 9000), ONE_TOKEN).stats
        assert again.attention["budget"] == 1664
