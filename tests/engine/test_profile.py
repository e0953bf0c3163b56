"""Models without a budget table: the first long prompt says what each head needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig, SamplingParams
from edgeh2o.attention import headwise
from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.engine import calibration
from edgeh2o.engine.calibration import LEVELS, PROFILE_TOKENS, PROFILED_LENGTH, profile_prompt
from edgeh2o.evaluation.ablation import evaluate_ablation
from edgeh2o.evaluation.attention_patterns import visualize_attention_patterns
from tests.tiny_models import TinyModelFactory

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
CHUNKS = PrefillConfig(batch_size=1024, chunk_size=256)


@pytest.fixture
def llm(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    path = tiny_model(tensor_type="Q8_0", context_length=8192)
    with LLM(path, attention=HeadwiseConfig(budget=600), prefill=CHUNKS) as loaded:
        yield loaded


def random_prompt(llm: LLM, n_tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, llm.config.vocab_size, n_tokens).astype(np.int32)


def test_the_first_long_prompt_decides(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (random_prompt(llm, n) for n in (PROFILED_LENGTH - 1, PROFILED_LENGTH))
    assert llm.generate(short, ONE_TOKEN).stats.attention["table"] == "uniform"
    stats = llm.generate(long, ONE_TOKEN).stats
    assert (stats.attention["table"], stats.attention["budget"]) == ("profile", 600)
    expected = profile_prompt(llm.model, long, threads=llm.threads)
    assert isinstance(llm.attention, HeadwiseConfig)
    assert llm.attention.profile == expected
    budgets = llm.attention.choose_budgets(llm.config).per_head
    assert budgets == expected.budgets(600)
    assert len(set(budgets)) > 1

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("profiled again")

    monkeypatch.setattr(calibration, "profile_prompt", unexpected)
    assert llm.generate(random_prompt(llm, 5000, 1), ONE_TOKEN).stats.attention["table"] == (
        "profile"
    )
    assert llm.attention.profile == expected
    assert "profile" not in llm.attention.to_dict()
    assert "profile" not in llm.attention.describe()


def test_the_answer_is_that_of_the_budgets(llm: LLM) -> None:
    prompt = random_prompt(llm, PROFILED_LENGTH)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids = llm.generate(prompt, greedy).token_ids
    assert isinstance(llm.attention, HeadwiseConfig)
    budgets = llm.attention.choose_budgets(llm.config).per_head
    given = HeadwiseConfig(budgets=budgets)
    with LLM(llm.model_path, attention=given, prefill=CHUNKS) as other:
        assert other.generate(prompt, greedy).token_ids == ids
        assert other.attention == given


def test_evaluations_measure_what_a_long_prompt_gets(llm: LLM, tmp_path: Path) -> None:
    text = "the thing is that the art is there and the hen is in the pen " * 500
    report = evaluate_ablation(llm, text, {"budget": (300,)}, context_size=PROFILED_LENGTH)
    varied = report.results[0].setting.attention.report(llm.config)
    assert (varied["table"], varied["budget"]) == ("profile", 300)
    with LLM(llm.model_path, attention=HeadwiseConfig(budget=600), prefill=CHUNKS) as other:
        selection = visualize_attention_patterns(
            other, text, tmp_path, context_size=PROFILED_LENGTH, layers=[]
        )
    assert (selection.attention["table"], selection.attention["budget"]) == ("profile", 600)


def test_prompts_that_may_be_saved_do_not_profile(llm: LLM) -> None:
    prompt = random_prompt(llm, PROFILED_LENGTH)
    stats = llm.generate(prompt, ONE_TOKEN, keep_cache=True).stats
    assert stats.attention["table"] == "uniform"


def test_a_table_is_better_than_a_profile(llm: LLM, tmp_path: Path) -> None:
    prompt = random_prompt(llm, PROFILED_LENGTH)
    table = profile_prompt(llm.model, prompt, threads=1)
    write_table(table, table_path(llm.config.fingerprint))
    with LLM(llm.model_path, attention=llm.attention, prefill=CHUNKS) as calibrated:
        assert not calibrated.profile_budgets(prompt)
        assert calibrated.generate(prompt, ONE_TOKEN).stats.attention["table"] == "cache"
    path = tmp_path / "table.json"
    write_table(table, path)
    config = HeadwiseConfig(budget_table=str(path)).resolved(llm.config)
    assert (config.needs_profile, config.source) == (False, "file")


def test_given_budgets_need_no_profile(llm: LLM) -> None:
    assert not HeadwiseConfig(budgets=(None,) * 6).resolved(llm.config).needs_profile
    assert HeadwiseConfig().resolved(llm.config).needs_profile


def test_a_run_looks_for_its_table_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def count(fingerprint: str) -> None:
        found.append(fingerprint)

    monkeypatch.setattr(headwise, "find_table", count)
    with LLM(llm.model_path, prefill=CHUNKS) as other:
        other.generate(random_prompt(other, 300), ONE_TOKEN)
        other.generate(random_prompt(other, PROFILED_LENGTH), ONE_TOKEN)
        other.start_runner(300)
        assert found == [other.config.fingerprint]


def test_a_profile_is_a_calibration_at_a_quarter_of_the_length(llm: LLM) -> None:
    prompt = random_prompt(llm, PROFILED_LENGTH)
    table = profile_prompt(llm.model, prompt, threads=1)
    assert table.levels == LEVELS
    assert table.mean_past == np.mean(np.arange(1024, 4096))
    measured = calibration.measure_head_errors(
        llm.model,
        prompt[:PROFILE_TOKENS],
        threads=llm.threads,
        levels=[16, 32, 64, 112, 176, 256],
        first_query=512,
        rule=HeadwiseConfig(local=128),
        chunk_size=128,
    )
    np.testing.assert_array_equal(np.array(table.errors), measured.errors)
    assert (measured.errors[:, 0] > measured.errors[:, -1]).all()
