"""Long prompts are read in 8 bits where it was measured to be harmless, and nothing was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import (
    LLM,
    DenseConfig,
    H2OConfig,
    HeadwiseConfig,
    PrefillConfig,
    SamplingParams,
    _core,
    isa,
)
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.budget_table import find_table, table_path, write_table
from edgeh2o.attention.rounding_quality import RoundingQuality
from edgeh2o.config import RuntimeConfig
from edgeh2o.engine import payoff
from edgeh2o.engine.payoff import choose_reading
from edgeh2o.engine.plan import RunPlan
from edgeh2o.engine.precisions import MIN_ROUNDED_TOKENS
from edgeh2o.evaluation.calibration import calibrate
from tests.budget_tables import calibrate_by_few_windows, harmless_table
from tests.engine.fakes import CONFIG
from tests.tiny_models import TinyModelFactory

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
HARMLESS = RoundingQuality(length=4096, kl={"prose": 4e-4}, loss=0.03)
HARMFUL = RoundingQuality(length=4096, kl={"prose": 4e-3}, loss=0.03)
# Of a guard, in percent, as that of the packaged table.
LENIENT = 4.5
TableOf = Callable[..., HeadwiseConfig]


@pytest.fixture(autouse=True)
def precisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a machine that has int8, whatever this one has."""
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_core, "attention_precisions", lambda: ["f32", "bf16", "int8"])
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "bf16")


@pytest.fixture
def by_table(tmp_path: Path) -> TableOf:
    """A rule by a table that says of rounding what it is given."""

    def make(rounding: RoundingQuality | None, config: Any = CONFIG) -> HeadwiseConfig:
        path = tmp_path / f"{config.fingerprint}.json"
        write_table(harmless_table(config, 256, rounding=rounding), path)
        return HeadwiseConfig(budget_table=str(path))

    return make


def plan_of(
    attention: SparseAttentionConfig,
    *,
    max_error: float | None = LENIENT,
    device: str = "cpu",
    config: Any = CONFIG,
    **runtime: Any,
) -> RunPlan:
    settings = PrefillConfig(max_error=max_error), RuntimeConfig(**runtime)
    return RunPlan.of(config, attention, *settings, device)


def precision(attention: SparseAttentionConfig, n_tokens: int = 4096, **options: Any) -> str:
    plan = plan_of(attention, **options)
    chosen = plan.for_length(n_tokens)
    assert chosen.for_length(1) == plan  # nothing of a longer prompt stays
    assert chosen.shape(64).precision == chosen.report()["attention_precision"]
    return chosen.precision


def test_by_the_length_of_the_prompt(by_table: TableOf) -> None:
    attention = by_table(HARMLESS)
    assert precision(attention, MIN_ROUNDED_TOKENS - 1) == "bf16"
    assert precision(attention, MIN_ROUNDED_TOKENS) == "int8"


def test_only_where_it_is_known_to_be_harmless(by_table: TableOf) -> None:
    assert precision(by_table(HARMLESS)) == "int8"
    assert precision(replace(by_table(HARMLESS), budget=64)) == "int8"
    for rounding in (HARMFUL, None):
        assert precision(by_table(rounding)) == "bf16"
    for attention in (HeadwiseConfig(), HeadwiseConfig(budget=64), H2OConfig()):
        assert precision(attention) == "bf16"


def test_what_is_asked_for_stays(by_table: TableOf) -> None:
    assert precision(by_table(HARMLESS), attention_precision="f32") == "f32"
    assert precision(by_table(None), attention_precision="int8") == "int8"
    assert precision(DenseConfig()) == "bf16"  # answers as any other program's


def test_whatever_the_guard_allows(by_table: TableOf) -> None:
    """It takes off what is rounded: tests/ops/test_error_sample.py."""
    attention = by_table(HARMLESS)
    for max_error in (0.1, 1.0, None):
        assert precision(attention, max_error=max_error) == "int8"
    plan = plan_of(attention, max_error=1.0)
    assert plan.reading_all().for_length(4096).precision == "int8"
    learning = plan_of(HeadwiseConfig()).reading_all().learning(4096)
    assert learning.attention.is_learning and learning.precision == "bf16"


def test_where_it_has_not_been_measured(by_table: TableOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with biases of other than our decoder; and a GPU has products of its own."""
    attention = by_table(HARMLESS)
    assert precision(attention, config=replace(CONFIG, has_key_bias=True)) == "f32"
    assert precision(attention, device="cuda:0") == "bf16"
    monkeypatch.setattr(_core, "attention_precisions", lambda: ["f32"])
    assert precision(attention) == "bf16"


def test_keys_with_biases(by_table: TableOf, tiny_model: TinyModelFactory) -> None:
    """They are f32 where they are not rounded: bf16 holds them badly."""
    with LLM(tiny_model(architecture="qwen2")) as llm:
        config = llm.config
    assert config.has_key_bias
    assert precision(by_table(HARMLESS, config), config=config) == "int8"
    assert precision(by_table(HARMFUL, config), config=config) == "f32"


def test_sixteen_bits_are_for_even_keys(
    by_table: TableOf, tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of our decoder on the CPU, whose biases it evens out."""
    monkeypatch.setattr(_core, "attention_precisions", lambda: ["f32", "int16", "int8"])
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "int16")
    with LLM(tiny_model(architecture="qwen2")) as llm:
        biased = llm.config
    with LLM(tiny_model(architecture="deepseek2")) as llm:
        latent = llm.config
    assert biased.has_key_bias and latent.latent is not None
    attention = by_table(HARMFUL)
    assert precision(attention) == "int16"
    assert precision(by_table(HARMFUL, biased), config=biased) == "int16"
    assert precision(DenseConfig(), config=latent) == "f32"
    assert precision(attention, config=replace(CONFIG, has_key_bias=True)) == "f32"
    assert precision(attention, device="cuda:0") == "f32"
    assert precision(by_table(HARMLESS)) == "int8"


def test_what_pays_is_told_by_what_is_multiplied(
    by_table: TableOf, tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products of the prompt itself, and of a dense one."""
    seen = []

    def saves_time(config: object, precision: str, *_: object, dense_precision: str) -> bool:
        seen.append((precision, dense_precision))
        return False

    monkeypatch.setattr(payoff, "saves_time", saves_time)
    with LLM(tiny_model(context_length=8192), attention_precision="f32") as llm:
        known = by_table(HARMLESS, llm.config)
        for attention, max_error in ((known, LENIENT), (known, 1.0), (HeadwiseConfig(), None)):
            plan = plan_of(attention, max_error=max_error, config=llm.config)
            chosen = choose_reading(plan, llm.model, 4096)
            assert chosen.attention.reads_all
            assert chosen.precision == seen[-1][1]
    assert seen == [("int8", "int8"), ("int8", "int8"), ("bf16", "bf16")]


def test_what_was_measured_of_the_packaged_model_allows_it() -> None:
    found = find_table("033526a135499773639407b17479d51b")
    assert found is not None and found[1] == "package"
    assert found[0].rounding is not None and found[0].rounding.is_harmless


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this machine has."""
    monkeypatch.undo()
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")


def test_statistics_and_sessions(
    machine: None, by_table: TableOf, tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    tokens = np.random.default_rng(0).integers(3, 300, 2000).tolist()
    exact, path = isa.attention_precision("auto"), tiny_model(context_length=4096)
    with LLM(path) as llm:
        attention = replace(by_table(HARMLESS, llm.config), budget=256)
    with LLM(path, attention=attention) as llm:
        for n_tokens, expected in ((2000, "int8"), (500, exact), (2000, "int8")):
            stats = llm.generate(tokens[:n_tokens], ONE_TOKEN).stats
            assert stats.attention_precision == expected
        # A conversation may become long.
        stats = llm.generate(tokens[:500], ONE_TOKEN, keep_cache=True).stats
        assert stats.attention_precision == "int8"
        llm.save_session(tmp_path / "s.session")
    with LLM(path, attention=attention) as llm:
        llm.load_session(tmp_path / "s.session")
        stats = llm.generate(tokens, ONE_TOKEN, keep_cache=True).stats
        assert (stats.cached_tokens, stats.attention_precision) == (500, "int8")


@pytest.mark.parametrize("saved_by", ["auto", "exact"])
def test_a_saved_prompt_goes_on_as_it_was_multiplied(
    machine: None, tiny_model: TinyModelFactory, tmp_path: Path, saved_by: str
) -> None:
    """By the table of the model, too, whose budgets are those of the file then."""
    tokens = np.random.default_rng(0).integers(3, 300, 3000).tolist()
    path = tiny_model(context_length=4096)
    if saved_by == "exact":
        saved_by = isa.attention_precision("auto")
    expected = "int8" if saved_by == "auto" else saved_by
    with LLM(path) as llm:
        table = harmless_table(llm.config, 256, rounding=HARMLESS)
    write_table(table, table_path(table.fingerprint))
    with LLM(path, attention_precision=saved_by) as llm:
        whole = llm.generate(tokens, ONE_TOKEN, logprobs=True, keep_cache=True)
        assert whole.stats.attention_precision == expected

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and 2048 <= done < total:
            raise KeyboardInterrupt

    with LLM(path, attention_precision=saved_by, on_progress=interrupt) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(tokens, ONE_TOKEN, keep_cache=True)
        llm.save_session(tmp_path / "s.session")
    with LLM(path) as llm:
        llm.load_session(tmp_path / "s.session")
        rest = llm.generate(tokens, ONE_TOKEN, logprobs=True, keep_cache=True)
        assert rest.stats.cached_tokens >= 1024
        assert rest.stats.attention_precision == expected
        assert rest.logprobs == whole.logprobs
    if saved_by == "auto":
        with LLM(path, attention_precision="f32") as llm:  # asked for
            llm.load_session(tmp_path / "s.session")
            stats = llm.generate(tokens, ONE_TOKEN, keep_cache=True).stats
            assert (stats.cached_tokens > 0, stats.attention_precision) == (True, "f32")


def test_rounding_is_measured_on_what_calibrate_reads(
    machine: None, tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_by_few_windows(monkeypatch)
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    texts = [" ".join(["the art of the thing is that it is there"] * 400)]
    with LLM(path, prefill=PrefillConfig(batch_size=1024)) as llm:
        table = calibrate(llm, texts, length=2048)
        assert table.rounding is not None and table.rounding.length == 2048
        assert table.rounding.loss != 0 and 0 < table.rounding.kl["text 1"] < 1e-3
    with LLM(path, attention_precision="f32") as llm:
        assert calibrate(llm, texts, length=2048).rounding is None
