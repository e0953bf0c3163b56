"""What a server knows of its model is what it knew at the start: its answers do not change."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o import LLM, PrefillConfig
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.kept_profiles import find_profile, profile_path
from edgeh2o.engine import payoff
from edgeh2o.errors import ResourceError
from edgeh2o.formats.known_models import CACHE_VARIABLE
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine

LONG = tokens_of(2600, seed=1)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def fingerprint_of(model: Path) -> str:
    with LLM(model, threads=1) as llm:
        return llm.config.fingerprint


def refine(fingerprint: str) -> None:
    """Leaves a profile that gives every head another budget."""
    known = find_profile(fingerprint)
    assert known is not None
    other = replace(known, errors=tuple(reversed(known.errors)), prompts=2)
    write_table(other, profile_path(fingerprint))


def test_answers_are_the_same_after_other_long_prompts(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)  # sparse always pays
    unguarded = PrefillConfig(max_error=1000.0)
    with open_engine(serving_model, prefill=unguarded, prefix_ram_bytes=0) as engine:
        attention = engine.pool.plan.report()["attention"]
        assert attention["table"] == "profile (1 prompt)"
        first = answer(engine, request_of(LONG))
        assert first.stats.pairs_computed < first.stats.pairs_dense  # sparse from the beginning
        for seed in (2, 3):
            answer(engine, request_of(tokens_of(2500, seed=seed)))
        again = answer(engine, request_of(LONG))
        assert again.stats.cached_tokens == 0
        assert again.logprobs == first.logprobs
        assert engine.pool.plan.report()["attention"] == attention
    known = find_profile(fingerprint_of(serving_model))
    assert known is not None and known.prompts == 1


def test_what_others_learn_counts_from_the_next_start_on(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)  # sparse always pays
    disk = (tmp_path / "disk", 2**26)
    options = {"prefill": PrefillConfig(), "prefix_ram_bytes": 0, "prefix_disk": disk}
    with open_engine(serving_model, **options) as engine:
        first = answer(engine, request_of(LONG))
        refine(fingerprint_of(serving_model))
        engine.pool.wait_for_disk()
        again = answer(engine, request_of(LONG))
        assert again.stats.cached_tokens == len(LONG)
        assert again.logprobs == first.logprobs
    with open_engine(serving_model, **options) as engine:
        assert engine.pool.plan.report()["attention"]["table"] == "profile (2 prompts)"
        # What was read by other budgets would go on by those.
        assert answer(engine, request_of(LONG)).stats.cached_tokens == 0


def test_a_prefix_on_disk_that_was_read_dense_serves_whatever_was_learnt(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)  # sparse never pays
    disk = (tmp_path / "disk", 2**26)
    options = {"prefill": PrefillConfig(), "prefix_ram_bytes": 0, "prefix_disk": disk}
    with open_engine(serving_model, **options) as engine:
        first = answer(engine, request_of(LONG))
        assert first.stats.pairs_computed == first.stats.pairs_dense
        refine(fingerprint_of(serving_model))
        engine.pool.wait_for_disk()
    with open_engine(serving_model, **options) as engine:
        again = answer(engine, request_of(LONG))
        assert again.stats.cached_tokens == len(LONG)
        assert again.logprobs == first.logprobs


def test_a_model_that_cannot_be_profiled_is_read_dense(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("no room")

    monkeypatch.setattr("edgeh2o.engine.session.measure_profile", refuse)
    with (
        caplog.at_level(logging.WARNING, "edgeh2o.serving"),
        open_engine(serving_model, prefill=PrefillConfig()) as engine,
    ):
        assert engine.pool.plan.report()["attention"]["table"].startswith("dense")
    assert "read dense: no room" in caplog.text


def test_short_contexts_and_small_batches_need_no_profile(serving_model: Path) -> None:
    for options in ({"context_size": 1024}, {"prefill": PrefillConfig(batch_size=512)}):
        with open_engine(serving_model, **({"prefill": PrefillConfig()} | options)) as engine:
            assert engine.pool.plan.report()["attention"]["table"].startswith("dense")
    assert find_profile(fingerprint_of(serving_model)) is None


def test_the_example_text_is_long_enough() -> None:
    from edgeh2o.engine.profile import example_text

    assert len(example_text().split()) > 2048
