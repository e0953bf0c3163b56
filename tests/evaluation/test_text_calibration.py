"""What ``calibrate`` measures of the texts that a table is made of, each read densely once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, PrefillConfig, _core
from edgeh2o.engine.calibration import measure_head_errors
from edgeh2o.evaluation import rounding_calibration, text_calibration
from edgeh2o.evaluation.calibration_notes import CalibrationNotes
from edgeh2o.evaluation.comparison import WindowComparer, score_window
from edgeh2o.evaluation.long_texts import make_window
from edgeh2o.evaluation.text_calibration import (
    CalibrationText,
    TextMeter,
    TextReading,
    count_loss_steps,
    count_reading_steps,
    summarise_rounding,
)
from tests.budget_tables import table_of_model
from tests.evaluation.counted import Counted, CountingRunner
from tests.tiny_models import TinyModelFactory

LENGTH = 1100


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with pytest.MonkeyPatch.context() as patch:
        # Since bf16 rounds otherwise when chunks are cut otherwise.
        patch.setattr(_core, "best_attention_precision", lambda: "f32")
        with LLM(path, prefill=PrefillConfig(batch_size=512)) as llm:  # less than a text
            yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[CalibrationText]:
    return [
        CalibrationText(kind, make_window(llm, kind, LENGTH)) for kind in ("facts", "prose", "code")
    ]


def test_one_dense_read_serves_errors_and_scores(
    llm: LLM, texts: list[CalibrationText], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reads = PrefillConfig(batch_size=2048), []
    start = type(llm).start_runner

    def start_counting(self: LLM, *args: Any, is_rounded: bool, **options: Any) -> Any:
        runner = start(self, *args, is_rounded=is_rounded, **options)
        return runner if is_rounded else CountingRunner(runner, reads)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm), "start_runner", start_counting)
        counted = Counted(count_reading_steps(llm, 3) * llm.config.n_layers)
        readings = TextMeter(llm, LENGTH, CalibrationNotes()).read(texts, counted.progress)
    assert reads == [LENGTH] * 3
    assert counted.done == counted.total
    dense = llm.start_runner(LENGTH, attention=DenseConfig(), prefill=whole, all_rows=True)
    for text, reading in zip(texts, readings, strict=True):
        assert reading.nll == score_window(dense, text.tokens, first=1024).mean()
        own = measure_head_errors(llm.model, text.tokens, threads=llm.threads)
        np.testing.assert_allclose(reading.errors, own.errors, rtol=1e-4)


def test_what_is_attended_to_in_other_types_is_no_error(
    tiny_model: TinyModelFactory, texts: list[CalibrationText]
) -> None:
    """Of heads that keep everything nothing is lost, whatever the cache rounds."""
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path, cache_type="q8_0") as llm:
        meter = TextMeter(llm, LENGTH, CalibrationNotes())
        (reading,) = meter.read(texts[:1], Counted().progress)
        own = measure_head_errors(llm.model, texts[0].tokens, threads=llm.threads)
    np.testing.assert_allclose(reading.errors, own.errors, rtol=0.25, atol=1e-12)
    assert np.max(reading.errors, axis=0)[-1] < 1e-12


@pytest.mark.skipif("int8" not in _core.attention_precisions(), reason="no products in 8 bits")
def test_rounding_is_measured_until_it_loses_too_much(
    llm: LLM, texts: list[CalibrationText], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    for rounded, chunk in ((True, None), (False, 256)):
        runners = [
            llm.start_runner(
                LENGTH,
                attention=DenseConfig(),
                prefill=PrefillConfig(batch_size=2048, chunk_size=each),
                all_rows=True,
                is_rounded=is_rounded,
            )
            for each, is_rounded in ((None, False), (chunk, rounded))
        ]
        compared = WindowComparer(runners[0]).compare(runners[1], texts[0].tokens, first=1024)
        scores.append(compared)
    rounded_kl, floor = (float(each.kl.mean()) for each in scores)
    assert rounded_kl > 2 * floor > 0
    for limit, expected, n_measured in (
        (np.inf, rounded_kl, 3),
        (rounded_kl / 10, rounded_kl - floor, 1),
    ):
        monkeypatch.setattr(rounding_calibration, "KL_LIMIT", limit)
        monkeypatch.setattr(text_calibration, "rounding_limit", lambda text, most=limit: most)
        counted = Counted(count_reading_steps(llm, 3) * llm.config.n_layers)
        readings = TextMeter(llm, LENGTH, CalibrationNotes()).read(texts, counted.progress)
        assert readings[0].rounding_kl == pytest.approx(expected)
        assert readings[0].rounding_loss == pytest.approx(
            float((scores[0].sparse_nll - scores[0].dense_nll).mean())
        )
        measured = [each.rounding_kl is not None for each in readings]
        assert measured == [i < n_measured for i in range(3)]
        assert counted.done == counted.total
        quality = summarise_rounding(texts, readings)
        assert quality is not None and len(quality.kl) == n_measured


def test_the_quality_of_rounding_is_that_of_all_texts(texts: list[CalibrationText]) -> None:
    readings = [TextReading([], 2.0, kl, loss) for kl, loss in ((1e-4, 2e-3), (3e-4, -1e-3))]
    quality = summarise_rounding(texts[:2], readings)
    assert quality is not None
    assert (quality.length, quality.kl) == (LENGTH, {"facts": 1e-4, "prose": 3e-4})
    assert quality.loss == round(100 * np.expm1(5e-4), 4)
    assert summarise_rounding(texts[:1], [TextReading([], 2.0)]) is None


def test_losses_are_those_of_the_texts(
    llm: LLM, texts: list[CalibrationText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is noted is read no more."""
    monkeypatch.setattr(text_calibration, "MEASURED_BUDGETS", (80, 128))
    sizes = {"chunk_size": 256, "length": LENGTH, "mean_past": 1062.0, "levels": (64, 128)}
    table = table_of_model(llm.config, ((1.0, 0.5),), **sizes)
    notes = CalibrationNotes()
    meter = TextMeter(llm, LENGTH, notes)
    readings = meter.read(texts, Counted().progress)
    n_steps = count_loss_steps(3) * llm.config.n_layers
    found = []
    for n_done in (n_steps, 0):
        counted = Counted(n_steps)
        found.append(meter.measure_losses(table, texts, readings, counted.progress))
        assert counted.done == counted.total == n_done
    assert found[0] == found[1]
    whole = PrefillConfig(batch_size=2048)
    dense = llm.start_runner(LENGTH, attention=DenseConfig(), prefill=whole, all_rows=True)
    for budget, loss in found[0].items():
        sparse = llm.start_runner(
            LENGTH,
            attention=HeadwiseConfig(budgets=table.budgets(budget)),
            prefill=whole,
            all_rows=True,
        )
        differences = [
            score_window(sparse, text.tokens, first=1024)
            - score_window(dense, text.tokens, first=1024)
            for text in texts
        ]
        expected = 100 * np.expm1(np.concatenate(differences).mean())
        assert loss == pytest.approx(expected, abs=1e-3)
