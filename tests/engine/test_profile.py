"""Models without a budget table: prompts are read dense until one has said what heads need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig
from edgeh2o.attention import head_budgets
from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.attention.head_budgets import PROFILE_BUDGET, SHARED_ERROR, UNKNOWN
from edgeh2o.attention.kept_profiles import (
    ENOUGH_PROMPTS,
    MIN_PROMPT,
    PARTS,
    PROFILE_TOKENS,
    find_profile,
    merge_profiles,
    profile_path,
)
from edgeh2o.engine import calibration, learning, profile
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.engine.profile import profile_prompt
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.ablation import evaluate_ablation
from edgeh2o.evaluation.attention_patterns import visualize_attention_patterns
from edgeh2o.evaluation.reading import prefill_prompt
from tests.engine.unknown_models import GREEDY, ONE_TOKEN, load, random_prompt, unknown_model
from tests.tiny_models import TinyModelFactory

SMALL = HeadwiseConfig(budget=600)


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unknown_model(tiny_model, tmp_path, monkeypatch)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with load(path, SMALL) as loaded:
        yield loaded


def table_of(llm: LLM, prompt: np.ndarray, **options: bool) -> str:
    return str(llm.generate(prompt, ONE_TOKEN, **options).stats.attention["table"])


@pytest.mark.parametrize("keep_cache", [False, True])
def test_the_first_long_prompt_begins_dense_and_teaches(path: Path, keep_cache: bool) -> None:
    """Its rest is read as it is by a policy that has the profile's budgets from there on."""
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        answer = llm.generate(prompt, GREEDY, keep_cache=keep_cache)
        stats = answer.stats
        assert stats.attention["table"] == "profile (1 prompt)"
        assert stats.attention["budget"] == PROFILE_BUDGET
        assert stats.note == "the first 1,024 tokens read dense and profiled"
        assert stats.note in stats.format_table()
        budgets = (1024,) * llm.config.n_layers * llm.config.n_heads
        runner = llm.start_runner(
            3200, attention=HeadwiseConfig(budgets=budgets, by_query_head=True)
        )
        runner.prefill(prompt[:1024], is_last=False)
        resolved = llm.attention.resolved(llm.config)
        assert isinstance(resolved, HeadwiseConfig) and resolved.budgets is not None
        runner.policy.set_budgets(resolved.budgets)
        logits = prefill_prompt(runner, prompt[1024:], n_read=1024)
        assert runner.pairs_computed == stats.pairs_computed < stats.pairs_dense
        assert int(logits.argmax()) == answer.token_ids[0]
        llm.forget()
        stats = llm.generate(prompt, ONE_TOKEN, keep_cache=keep_cache).stats
        assert stats.attention["table"] == "profile (1 prompt)"
        assert (stats.pairs_computed < stats.pairs_dense, stats.note) == (True, "")


def test_where_the_rest_cannot_follow_the_first_prompt_is_dense(path: Path) -> None:
    """Heads without a limit have nothing to choose from beyond max_past."""
    with load(path, HeadwiseConfig(max_past=2048)) as llm:
        prompt = random_prompt(llm, 3000)
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert stats.attention == {"algorithm": "headwise", "table": UNKNOWN}
        assert stats.pairs_computed == stats.pairs_dense
        assert "profiled; later prompts read sparse (1.2x fewer pairs at 3,000" in stats.note
        assert f"attention    {stats.note}" in stats.format_table()
        assert table_of(llm, prompt) == "profile (1 prompt)"


def test_a_profile_of_a_later_version_stays(path: Path) -> None:
    """And statistics say so: what is learnt serves this process alone."""
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        llm.generate(prompt, ONE_TOKEN)
    (kept,) = profile_path("x").parent.glob("*.profile.json")
    text = json.dumps(json.loads(kept.read_text()) | {"format": 2})
    kept.write_text(text)
    newer = "(the kept profile is of a newer edgeh2o, and stays)"
    with load(path) as llm:
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert stats.note == f"the first 1,024 tokens read dense and profiled {newer}"
        assert table_of(llm, prompt) == "profile (1 prompt)"
    assert kept.read_text() == text
    with load(path, HeadwiseConfig(max_past=2048)) as llm:
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert f"profiled {newer}; later prompts of this process read sparse" in stats.note


def test_no_gain_is_promised_where_few_layers_read_the_whole_past(
    tiny_model: TinyModelFactory,
) -> None:
    path = tiny_model(architecture="gemma3", context_length=4096, sliding_window=64)
    with load(path, HeadwiseConfig(max_past=2048)) as llm:
        stats = llm.generate(random_prompt(llm, 3000), ONE_TOKEN).stats
        assert (
            stats.note == "read dense and profiled; later prompts read sparse (if that is faster)"
        )


def test_a_short_prompt_is_dense_and_teaches_nothing(path: Path) -> None:
    with load(path) as llm:
        for _ in range(2):
            stats = llm.generate(random_prompt(llm, MIN_PROMPT - 1), ONE_TOKEN).stats
            assert (stats.attention["table"], stats.note) == (UNKNOWN, "")
            assert stats.pairs_computed == stats.pairs_dense


def test_a_prompt_that_grows_says_how_it_could_be_known(path: Path) -> None:
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        llm.generate(prompt[:500], ONE_TOKEN, keep_cache=True)
        stats = llm.generate(prompt, ONE_TOKEN, keep_cache=True).stats
        assert (stats.cached_tokens, stats.attention["table"]) == (500, UNKNOWN)
        assert f"begins with {MIN_PROMPT:,} tokens" in stats.note


def test_a_dense_answer_is_the_dense_one(path: Path) -> None:
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        ids = llm.generate(prompt[: MIN_PROMPT - 1], GREEDY).token_ids
        n_heads = llm.config.n_slots
    with load(path, HeadwiseConfig(budgets=(None,) * n_heads)) as other:
        assert other.generate(prompt[: MIN_PROMPT - 1], GREEDY).token_ids == ids


def test_budgets_by_hand_serve_until_something_is_known(llm: LLM) -> None:
    assert table_of(llm, random_prompt(llm, MIN_PROMPT - 1)) == "uniform"
    assert table_of(llm, random_prompt(llm)) == "profile (1 prompt)"
    stats = llm.generate(random_prompt(llm, 3000, 1), ONE_TOKEN).stats
    assert (stats.attention["table"], stats.attention["budget"]) == ("profile (1 prompt)", 600)
    assert isinstance(llm.attention, HeadwiseConfig)
    assert llm.attention.profile is not None
    budgets = llm.attention.choose_budgets(llm.config).per_head
    assert budgets == llm.attention.profile.smoothed(SHARED_ERROR).budgets(600)
    assert len(set(budgets)) > 1
    assert "profile" not in llm.attention.to_dict()
    assert "profile" not in llm.attention.describe()


def test_another_process_goes_on_from_what_is_known(path: Path) -> None:
    for n_known in range(ENOUGH_PROMPTS + 2):
        with load(path) as llm:
            known = find_profile(llm.config.fingerprint)
            prompts = min(n_known, ENOUGH_PROMPTS)
            assert (known.prompts if known else 0) == prompts
            expected = "1 prompt" if prompts <= 1 else f"{prompts} prompts"
            found = table_of(llm, random_prompt(llm, seed=n_known), keep_cache=n_known % 2 == 1)
            assert found == f"profile ({expected})"
    assert known is not None
    assert known.texts[-1] == f"prompt of {MIN_PROMPT} tokens"


def test_a_later_prompt_refines_every_third_layer(path: Path) -> None:
    with load(path) as llm:
        tables = []
        for seed in range(2):
            llm.generate(random_prompt(llm, seed=seed), ONE_TOKEN)
            tables.append(find_profile(llm.config.fingerprint))
        first, second = tables
        assert first is not None and second is not None
        n_heads = llm.config.n_heads
        changed = [i // n_heads for i, row in enumerate(second.errors) if row != first.errors[i]]
        assert {layer % PARTS for layer in changed} == {1}


def test_what_is_measured_in_passing_is_a_profile_of_the_prompt(llm: LLM) -> None:
    prompt = random_prompt(llm)
    llm.generate(prompt, ONE_TOKEN)
    expected = profile_prompt(llm.model, prompt, threads=llm.threads)
    assert expected is not None
    found = find_profile(llm.config.fingerprint)
    assert found is not None and (found.levels, found.prompts) == (LEVELS, 1)
    # The chunks of the prefill differ, and the file holds three digits.
    merged = merge_profiles(None, expected)
    np.testing.assert_allclose(found.errors, merged.errors, rtol=0.05, atol=1e-9)


def test_a_profile_is_a_calibration_at_a_quarter_of_the_length(llm: LLM) -> None:
    prompt = random_prompt(llm)
    table = profile_prompt(llm.model, prompt, threads=1)
    assert table is not None
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
    assert (measured.errors[:, 0] > measured.errors[:, -1]).all()
    # Some directions for the norm, and sizes between those measured.
    n_heads = llm.config.n_heads
    errors = np.array(table.errors)
    ratio = (errors / measured.errors)[:-n_heads]
    assert np.abs(np.log(ratio)).max() < np.log(2)
    assert np.abs(np.log(ratio)).mean() < np.log(1.3)
    # The last layer attends for the last token only, and is not measured.
    np.testing.assert_array_equal(errors[-n_heads:], errors[-2 * n_heads : -n_heads])


def test_a_broken_model_teaches_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_interpolate", lambda measured: measured * np.nan)
    stats = llm.generate(random_prompt(llm), ONE_TOKEN).stats
    assert (stats.pairs_computed, stats.attention["table"]) == (stats.pairs_dense, UNKNOWN)
    assert find_profile(llm.config.fingerprint) is None
    assert llm.attention == SMALL


def test_an_interrupted_prompt_teaches_nothing(llm: LLM) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    llm._session._on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(random_prompt(llm), ONE_TOKEN)
    llm._session._on_progress = None
    assert find_profile(llm.config.fingerprint) is None
    stats = llm.generate(random_prompt(llm), ONE_TOKEN).stats
    assert "profiled" in stats.note


def test_a_folder_that_cannot_be_written_is_no_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "file" / "cache"))
    with load(path) as llm:
        assert table_of(llm, random_prompt(llm)) == "profile (1 prompt)"
        assert table_of(llm, random_prompt(llm, seed=1)) == "profile (1 prompt)"
        assert table_of(llm, random_prompt(llm, seed=2)) == "profile (2 prompts)"
    with load(path) as llm:
        assert "profiled" in llm.generate(random_prompt(llm), ONE_TOKEN).stats.note


def test_sessions_hold_the_budgets_they_were_made_with(path: Path, tmp_path: Path) -> None:
    files = [tmp_path / "learning", tmp_path / "sparse"]
    continued = []
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        for file in files:
            llm.forget()
            answer = llm.generate(prompt, ONE_TOKEN, keep_cache=True)
            llm.save_session(file)
            more = [*prompt.tolist(), *answer.token_ids, *range(5, 300)]
            result = llm.generate(more, GREEDY, keep_cache=True)
            continued.append((more, result.token_ids))
    with load(path) as llm:
        for file, (more, ids) in zip(files, continued, strict=True):
            llm.load_session(file)
            result = llm.generate(more, GREEDY, keep_cache=True)
            assert result.stats.cached_tokens >= 3000
            assert result.token_ids == ids
            assert result.stats.attention["table"] == "session (profile)"
        assert table_of(llm, prompt) == "profile (2 prompts)"
    with (
        load(path, HeadwiseConfig(budget=700)) as llm,
        pytest.raises(UsageError, match="budget"),
    ):
        llm.load_session(files[1])


def test_evaluations_measure_what_a_long_prompt_gets(llm: LLM, tmp_path: Path) -> None:
    text = "the thing is that the art is there and the hen is in the pen " * 500
    report = evaluate_ablation(llm, text, {"budget": (300,)}, context_size=2560)
    varied = report.results[0].setting.attention.report(llm.config)
    assert (varied["table"], varied["budget"]) == ("profile (1 prompt)", 300)
    with load(llm.model_path, SMALL) as other:
        selection = visualize_attention_patterns(
            other, text, tmp_path, context_size=2560, layers=[]
        )
    assert selection.attention["table"] == "profile (1 prompt)"
    assert selection.attention["budget"] == 600


def test_a_table_is_better_than_a_profile(llm: LLM, tmp_path: Path) -> None:
    prompt = random_prompt(llm)
    table = profile_prompt(llm.model, prompt, threads=1)
    assert table is not None
    llm.generate(prompt, ONE_TOKEN)
    write_table(table, table_path(llm.config.fingerprint))
    with load(llm.model_path, SMALL) as calibrated:
        assert not calibrated.profile_budgets(prompt)
        assert table_of(calibrated, prompt) == "cache"
    with load(llm.model_path, HeadwiseConfig(budget_table="none")) as other:
        assert table_of(other, prompt) == "profile (1 prompt)"
    path = tmp_path / "table.json"
    write_table(table, path)
    config = HeadwiseConfig(budget_table=str(path)).resolved(llm.config)
    assert (config.profiled_prompts, config.source) == (None, "file")


def test_given_budgets_need_no_profile(llm: LLM) -> None:
    given = HeadwiseConfig(budgets=(None,) * 6).resolved(llm.config)
    assert given.profiled_prompts is None
    assert HeadwiseConfig().resolved(llm.config).profiled_prompts == 0


def test_a_damaged_file_is_made_anew(llm: LLM) -> None:
    place = profile_path(llm.config.fingerprint)
    place.parent.mkdir(parents=True, exist_ok=True)
    for content in ("", "{", '{"format": 1}'):
        place.write_text(content)
        assert find_profile(llm.config.fingerprint) is None
    llm.generate(random_prompt(llm), ONE_TOKEN)
    assert find_profile(llm.config.fingerprint) is not None


def test_a_run_looks_for_its_table_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def count(fingerprint: str) -> None:
        found.append(fingerprint)

    monkeypatch.setattr(head_budgets, "find_table", count)
    with load(path) as other:
        other.generate(random_prompt(other, 300), ONE_TOKEN)
        other.generate(random_prompt(other), ONE_TOKEN)
        other.start_runner(300)
        assert found == [other.config.fingerprint]


def test_constants_agree() -> None:
    assert (learning.MIN_PROMPT, learning.FIRST_CALL) == (MIN_PROMPT, PROFILE_TOKENS)
