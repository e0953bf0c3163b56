"""Models without a budget table: prompts are read dense until one has said what heads need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, PrefillConfig, SamplingParams, _core
from edgeh2o.attention import head_budgets
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.attention.head_budgets import PROFILE_BUDGET, SHARED_ERROR, TOO_SHORT, UNKNOWN
from edgeh2o.attention.kept_profiles import (
    ENOUGH_PROMPTS,
    MIN_PROMPT,
    PARTS,
    PROFILE_TOKENS,
    find_profile,
    merge_profiles,
    profile_path,
)
from edgeh2o.engine import calibration, learning, payoff, profile
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.engine.profile import profile_prompt
from edgeh2o.engine.rounding_probe import RoundingProbe
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.ablation import evaluate_ablation
from edgeh2o.evaluation.attention_patterns import visualize_attention_patterns
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.model_config import DecoderConfig
from tests.tiny_models import TinyModelFactory

if TYPE_CHECKING:
    from edgeh2o.model_config import LatentHeads

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# What random weights attend to no memory set keeps: the guard must let it pass.
CHUNKS = PrefillConfig(batch_size=1024, chunk_size=256, max_error=100)
SMALL = HeadwiseConfig(budget=600)


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    # However short: tests/engine/test_payoff.py has the lengths from which sparse pays.
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)
    return tiny_model(tensor_type="Q8_0", context_length=8192, n_heads=4, model_dim=128)


def load(path: Path, attention: SparseAttentionConfig | None = None) -> LLM:
    return LLM(path, attention=attention, prefill=CHUNKS)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with load(path, SMALL) as loaded:
        yield loaded


def random_prompt(llm: LLM, n_tokens: int = MIN_PROMPT, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, llm.config.vocab_size, n_tokens).astype(np.int32)


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


@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32"), (None, "f32")])
def test_dense_prompts_are_rounded_where_that_was_shown_to_change_little(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: float | None, expected: str
) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    with LLM(path) as llm:
        prompt = random_prompt(llm)
        llm.generate(prompt, ONE_TOKEN)
        known = find_profile(llm.config.fingerprint)
        assert known is not None and known.rounding_error is not None
        write_table(replace(known, rounding_error=error), profile_path(known.fingerprint))
    monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)  # sparse never pays
    with LLM(path) as llm:
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert stats.attention["table"] == TOO_SHORT
        assert stats.attention_precision == expected
        assert llm.generate(prompt[:1000], ONE_TOKEN).stats.attention_precision == "f32"


@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32")])
def test_so_are_sparse_prompts(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: float, expected: str
) -> None:
    """The rest of the first one, and the second from its beginning."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    monkeypatch.setattr(RoundingProbe, "error_percent", property(lambda _: error))
    with load(path) as llm:
        for seed in (0, 1):
            stats = llm.generate(random_prompt(llm, 3000, seed=seed), ONE_TOKEN).stats
            assert stats.attention_precision == expected
            assert stats.attention["table"].startswith("profile")
            assert stats.pairs_computed < stats.pairs_dense


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("may_be_sparse", [False, True])
@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32"), (None, "f32")])
def test_so_is_the_dense_rest_of_the_prompt_that_shows_it(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: float | None,
    expected: str,
    may_be_sparse: bool,
    keep_cache: bool,
) -> None:
    """Whether it began as one that would be read sparse, which its profile says would not pay."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    monkeypatch.setattr(RoundingProbe, "error_percent", property(lambda _: error))
    answers = iter([may_be_sparse, False])
    monkeypatch.setattr(payoff, "saves_time", lambda *_, **__: next(answers, False))
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        answer = llm.generate(prompt, GREEDY, keep_cache=keep_cache)
        stats = answer.stats
        assert stats.attention_precision == expected
        assert stats.attention["table"] == (TOO_SHORT if may_be_sparse else UNKNOWN)
        assert stats.pairs_computed == stats.pairs_dense and stats.heads_read_densely == 0
        assert ("1,024 tokens read dense and profiled" in stats.note) == may_be_sparse
        runner: Any = llm.start_runner(3200, attention=DenseConfig())
        runner.prefill(prompt[:1024], is_last=False)
        runner.read_rest(expected, reads_all=True)
        logits = prefill_prompt(runner, prompt[1024:], n_read=1024)
        assert int(logits.argmax()) == answer.token_ids[0]
        if not keep_cache:
            return
        # What goes on from it does so, in a cache that grows too.
        longer = np.concatenate([prompt, answer.token_ids, random_prompt(llm, 900, seed=1)])
        stats = llm.generate(longer, ONE_TOKEN, keep_cache=True).stats
        assert stats.cached_tokens >= 3000 and stats.attention_precision == expected
        assert stats.pairs_computed == stats.pairs_dense


def test_what_rounding_is_off_by_is_that_of_the_attention(llm: LLM) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    measured = profile_prompt(llm.model, random_prompt(llm), threads=1)
    assert measured is not None and measured.rounding_error is not None
    config, rng = llm.config, np.random.default_rng(0)
    assert isinstance(config, DecoderConfig)
    probe = RoundingProbe(config, 256, threads=1)
    q, k, v = (
        rng.standard_normal((300, n * config.head_dim), np.float32)
        for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    )
    outputs = {}
    for precision in ("f32", "int8"):
        attention = _core.ChunkedAttention(
            _core.dense_policy(),
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            chunk_size=256,
            batch_size=256,
            max_context=256,
            scale=config.attention_scale,
            threads=1,
            precision=precision,
        )
        rows = [part[:256].reshape(256, -1, config.head_dim) for part in (q, k, v)]
        outputs[precision] = attention.run(0, *rows, is_last=True).reshape(256, -1)[128:]
    exact = np.concatenate([np.zeros((128, q.shape[1])), outputs["f32"]])
    for layer in range(2):
        probe(layer, q, k, v, exact)
    off = np.linalg.norm(outputs["int8"] - outputs["f32"]) / np.linalg.norm(outputs["f32"])
    assert probe.error_percent == pytest.approx(100 * off) and 0.1 < 100 * off < 5
    plain, large = config.layers[0], replace(config.layers[0], has_large_keys=True)
    many = RoundingProbe(replace(config, layers=(large, *9 * [plain])), 256, threads=1)
    for layer in range(10):  # of the other nine every second
        many(layer, q, k, v, exact if layer % 2 else 2 * exact)
    assert many.error_percent == pytest.approx(100 * off)
    silent = RoundingProbe(replace(config, latent=cast("LatentHeads", object())), 256, threads=1)
    silent(0, q, k, v, q)
    assert silent.error_percent is None
