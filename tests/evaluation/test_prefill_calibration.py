"""What ``calibrate`` measures of prompts that are read by a table's budgets, under the guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, PrefillConfig
from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.attention.head_budgets import grow_budgets
from edgeh2o.attention.prefill_quality import PrefillQuality
from edgeh2o.attention.rounding_quality import RoundingQuality
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.evaluation import calibration, calibration_windows, prefill_calibration
from edgeh2o.evaluation.calibration import calibrate
from edgeh2o.evaluation.calibration_notes import CalibrationNotes
from edgeh2o.evaluation.calibration_windows import Windows, make_long_windows, make_windows
from edgeh2o.evaluation.comparison import WindowComparer, join_scores
from edgeh2o.evaluation.long_texts import KINDS, Window, make_window
from edgeh2o.evaluation.prefill_calibration import (
    PrefillMeter,
    count_prefill_steps,
    find_prefill,
)
from edgeh2o.evaluation.progress import Progress, Steps
from edgeh2o.evaluation.text_calibration import TextMeter
from tests.budget_tables import harmless_table
from tests.evaluation.counted import Counted, CountingRunner
from tests.tiny_models import TinyModelFactory

LENGTH, BUDGET = 2048, 64
FEW = {kind: KINDS[kind] for kind in ("prose", "pairs")}


def zeros(length: int) -> Window:
    return np.zeros(length, np.int32)


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path, prefill=PrefillConfig(batch_size=1024)) as llm:
        yield llm


@pytest.fixture(autouse=True)
def few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_windows, "KINDS", FEW)
    monkeypatch.setattr(calibration_windows, "_LONG_KINDS", ("pairs",))


def test_windows_are_of_two_lengths(llm: LLM) -> None:
    windows, long = make_windows(llm, LENGTH), make_long_windows(llm, 2 * LENGTH)
    assert list(windows) == ["pairs", "prose"]  # what loses most comes first
    assert {kind: [len(w) for w in texts] for kind, texts in windows.items()} == {
        "prose": [LENGTH, LENGTH],
        "pairs": [LENGTH, LENGTH],
    }
    assert {kind: [len(w) for w in texts] for kind, texts in long.items()} == {
        "pairs": [2 * LENGTH]
    }
    assert count_prefill_steps(windows, long, 2) == 2 * 2 * 4 + 5 * 4
    assert make_long_windows(llm, 2 * LENGTH + 1) == {}  # longer than it was trained on


def test_what_is_lost_is_that_of_a_default_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dense run; divergences above the limit less what other chunks make."""
    table, counted = harmless_table(llm.config, BUDGET), Counted()
    windows = {"pairs": [make_window(llm, "pairs", LENGTH, seed=seed) for seed in (0, 1)]}
    # Heads of random weights need everything.
    monkeypatch.setattr(prefill_calibration, "ERROR_OF_DEFAULT_LOSS", 60.0)
    prefill = replace(llm.prefill, max_error=60.0)
    rule = HeadwiseConfig(budgets=table.budgets(BUDGET))

    def scores(other: Mapping[str, object], texts: Sequence[Window]) -> tuple[float, float]:
        dense = llm.start_runner(LENGTH, attention=DenseConfig(), all_rows=True)
        runner = llm.start_runner(LENGTH, all_rows=True, is_rounded=False, **other)  # type: ignore[arg-type]
        comparer = WindowComparer(dense)
        first = LENGTH - 1 - LENGTH // 4
        joined = join_scores([comparer.compare(runner, text, first=first) for text in texts])
        assert len(joined) == 2 * LENGTH // 4
        difference = joined.sparse_nll - joined.dense_nll
        return 100 * float(np.expm1(difference.mean())), float(joined.kl.mean())

    for limit in (0.0, np.inf):
        monkeypatch.setattr(prefill_calibration, "kl_limit", lambda _, limit=limit: limit)
        meter = PrefillMeter(llm, table, windows, counted.steps(4), CalibrationNotes())
        quality = meter.measure(BUDGET)
        assert (quality.budget, quality.length) == (BUDGET, LENGTH)
        for kind, texts in windows.items():
            loss, kl = scores({"attention": rule, "prefill": prefill}, texts)
            chunks = replace(llm.prefill, chunk_size=256)
            _, floor = scores({"attention": DenseConfig(), "prefill": chunks}, texts)
            assert quality.loss[kind] == pytest.approx(loss, abs=1e-4)
            assert quality.loss_error[kind] > 0
            assert kl > 2 * floor > 0
            assert quality.kl[kind] == pytest.approx(kl - floor * (limit == 0), abs=1e-6)
    assert counted.done == 2 * 2 * 2


def test_nothing_is_read_after_what_loses_too_much(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, counted = harmless_table(llm.config, BUDGET), Counted()
    windows = {kind: [make_window(llm, kind, LENGTH, seed=0)] for kind in ("pairs", "prose")}
    monkeypatch.setattr(prefill_calibration, "ERROR_OF_DEFAULT_LOSS", 60.0)
    notes = CalibrationNotes()
    meter = PrefillMeter(llm, table, windows, counted.steps(9), notes)
    for budget, given_up_at, read in (
        (BUDGET, "pairs", ["pairs"]),
        (80, "prose", ["pairs", "prose"]),
        (96, "", ["prose", "pairs"]),  # what the budget before was given up at comes first
    ):
        is_hopeless = property(lambda quality, kind=given_up_at: kind in quality.loss)
        monkeypatch.setattr(PrefillQuality, "is_hopeless", is_hopeless)
        quality = meter.measure(budget)
        assert [list(each) for each in (quality.loss, quality.loss_error, quality.kl)] == [read] * 3
    assert counted.done == 2 * (1 + 2 + 2)
    again = PrefillMeter(llm, table, windows, counted.steps(9), notes).measure(96)
    assert (counted.done, again) == (2 * (1 + 2 + 2), quality)


def test_a_window_that_was_read_last_is_not_read_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next budget, of the two that a kind of text has."""
    llm = LLM(llm.model_path, prefill=PrefillConfig(batch_size=LENGTH))
    table, reads = harmless_table(llm.config, BUDGET), []
    windows = {"pairs": [make_window(llm, "pairs", LENGTH, seed=seed) for seed in (0, 1)]}
    monkeypatch.setattr(prefill_calibration, "kl_limit", lambda _: np.inf)
    start = type(llm).start_runner

    def start_counting(self: LLM, *args: Any, attention: Any, **options: Any) -> Any:
        runner = start(self, *args, attention=attention, **options)
        return CountingRunner(runner, reads) if attention == DenseConfig() else runner

    monkeypatch.setattr(type(llm), "start_runner", start_counting)
    meter = PrefillMeter(llm, table, windows, Counted().steps(4), CalibrationNotes())
    qualities = [meter.measure(budget) for budget in (BUDGET, 80)]
    assert len(reads) == 3
    alone = PrefillMeter(llm, table, windows, Counted().steps(4), CalibrationNotes()).measure(80)
    assert alone.loss["pairs"] == pytest.approx(qualities[1].loss["pairs"], abs=1e-4)
    llm.close()


@pytest.mark.parametrize(
    ("base", "budget", "rounding"),
    [
        (None, 512, None),
        (512, 1024, RoundingQuality(length=LENGTH, kl={"prose": 0.0}, loss=0.0)),
    ],
)
def test_windows_are_read_as_a_default_run_reads_them(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    base: int | None,
    budget: int,
    rounding: RoundingQuality | None,
) -> None:
    """By limits that grow, and by products in 8 bits where the table says that is harmless."""
    start = Mock(side_effect=[Mock(), ResourceError("enough")])
    monkeypatch.setattr(type(llm), "start_runner", start)
    table = harmless_table(llm.config, 512, rounding=rounding)
    windows = {"prose": [zeros(LENGTH)]}
    meter = PrefillMeter(llm, table, windows, Counted().steps(1), CalibrationNotes(), base)
    with pytest.raises(ResourceError):
        meter.measure(budget)
    asked = start.call_args.kwargs
    assert asked["attention"].budgets == grow_budgets(table, 512, budget)
    assert asked["is_rounded"] is (rounding is not None)
    assert asked["prefill"].max_error == 4.5


# Twice the length, 8,192 tokens, has half as many keys again, and up to two and a half times that.
@pytest.mark.parametrize(
    ("plain_from", "long_from", "tried", "expected"),
    [
        (0, 0, [512, -768], [512, 768]),
        (768, 0, [512, 768, -1152], [768, 1152]),
        (512, 1000, [512, -768, -896, -1024], [512, 1024]),
        (512, 1200, [512, -768, -896, -1024, -1152, -1280], [512, 1280]),
        # What serves the shorter ones alone.
        (512, 9999, [512, -768, -896, -1024, -1152, -1280], [512]),
        (9999, 0, [512, 768, 1024], [1024]),
        (0, None, [512, -768], [512]),  # no room for the long ones
    ],
)
def test_more_keys_are_tried_where_few_lose_too_much(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    plain_from: int,
    long_from: int | None,
    tried: list[int],
    expected: list[int],
) -> None:
    windows, long = {"prose": [zeros(4096)]}, {"pairs": [zeros(8192)]}
    measured, n_layers = [], llm.config.n_layers
    counted = Counted(count_prefill_steps(windows, long, 4) * n_layers)

    class Meter:
        def __init__(
            self,
            llm: LLM,
            table: BudgetTable,
            windows: Windows,
            steps: Steps,
            notes: CalibrationNotes,
            base: int | None = None,
        ) -> None:
            self.steps = steps
            ((self.kind, (window,)),) = windows.items()
            self.length = len(window)
            assert base == (None if self.length == 4096 else expected[0])

        def measure(self, budget: int) -> PrefillQuality:
            measured.append(budget if self.length == 4096 else -budget)
            harmless_from = plain_from if self.length == 4096 else long_from
            if harmless_from is None:
                raise ResourceError("two sessions do not fit")
            self.steps.advance()
            return PrefillQuality(
                budget=budget,
                length=self.length,
                loss={self.kind: 0.0},
                loss_error={self.kind: 0.1},
                kl={self.kind: 0.0 if budget >= harmless_from else 1.0},
            )

    monkeypatch.setattr(prefill_calibration, "PrefillMeter", Meter)
    table = replace(
        harmless_table(llm.config, 512), losses={256: 0.6, 512: 0.4, 768: 0.1, 1024: 0.0}
    )
    found = find_prefill(llm, table, windows, long, counted.progress, CalibrationNotes())
    assert (measured, [each.budget for each in found]) == (tried, expected)
    assert [each.length for each in found] == [4096, 8192][: len(expected)]
    assert found[0].is_harmless == (plain_from <= 1024)
    n_measured = len(measured) - (long_from is None)
    assert counted.done == counted.total == n_measured * n_layers


def test_budgets_that_are_not_worth_it_are_not_tried(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,096 tokens, where dense prompts read 2,048 keys in the mean."""
    quality = PrefillQuality(
        budget=1024, length=2048, loss={"pairs": 0.0}, loss_error={"pairs": 0.1}, kl={"pairs": 0.0}
    )
    bad = replace(quality, budget=1152, length=4096, kl={"pairs": 1.0})
    find = Mock(side_effect=[quality, bad] * 2)
    monkeypatch.setattr(prefill_calibration, "_find_least", find)
    windows, long = {"pairs": [zeros(2048)]}, {"pairs": [zeros(4096)]}
    table = replace(harmless_table(llm.config, 1024), length=2048)
    assert find_prefill(llm, table, windows, long, Progress(None, 0), CalibrationNotes()) == (
        quality,
    )
    (_, least), (_, tried) = (call.args for call in find.call_args_list)
    assert least == [1024]
    assert tried == [1024, 1216, 1344]  # of up to 1,664
    monkeypatch.setattr(prefill_calibration, "_WORTHWHILE", 0.1)
    assert find_prefill(llm, table, windows, long, Progress(None, 0), CalibrationNotes()) == (
        quality,
    )
    assert find.call_count == 3


def test_nothing_is_measured_where_every_budget_loses_too_much(llm: LLM) -> None:
    table = replace(harmless_table(llm.config, 512), losses={512: 0.7})
    assert find_prefill(llm, table, {}, {}, Progress(None, 0), CalibrationNotes()) == ()


def test_a_calibration_measures_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(["the art of the thing is that it is there"] * 400)]
    monkeypatch.setattr(calibration, "MEASURED_BUDGETS", (512, 768))
    monkeypatch.setattr(calibration, "count_loss_steps", lambda *_: 0)
    monkeypatch.setattr(TextMeter, "measure_losses", lambda *_: {512: 0.7, 768: 0.4})
    reports: list[tuple[str, int, int]] = []
    table = calibrate(
        llm,
        texts,
        length=LENGTH,
        decode=False,
        on_progress=lambda *report: reports.append(report),
    )
    assert table.prefill[0].budget == 768
    assert table.prefill[0].kl.keys() == FEW.keys()
    _, done, total = reports[-1]
    assert done == total
    # What nobody asked for costs nobody a table.
    monkeypatch.setattr(calibration_windows, "make_window", Mock(side_effect=UsageError("few")))
    assert calibrate(llm, texts, length=LENGTH, decode=False).prefill == ()
