"""What ``calibrate`` measures of prompts that are read by a table's budgets, under the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from edgeh2o.evaluation.calibration_windows import Windows, make_long_windows, make_windows
from edgeh2o.evaluation.comparison import WindowComparer, join_scores
from edgeh2o.evaluation.long_texts import KINDS, Window, make_window
from edgeh2o.evaluation.prefill_calibration import (
    PrefillMeter,
    count_prefill_steps,
    find_prefill,
)
from tests.budget_tables import harmless_table
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
    assert count_prefill_steps(windows, long, 2) == 2 * (4 + 3)
    assert make_long_windows(llm, 2 * LENGTH + 1) == {}  # longer than it was trained on


def test_what_is_lost_is_that_of_a_default_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dense run; divergences above the limit less what other chunks make."""
    table, steps = harmless_table(llm.config, BUDGET), []
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
        meter = PrefillMeter(llm, table, windows)
        quality = meter.measure(BUDGET, on_step=lambda: steps.append(1))
        assert (quality.budget, quality.length) == (BUDGET, LENGTH)
        for kind, texts in windows.items():
            loss, kl = scores({"attention": rule, "prefill": prefill}, texts)
            chunks = replace(llm.prefill, chunk_size=256)
            _, floor = scores({"attention": DenseConfig(), "prefill": chunks}, texts)
            assert quality.loss[kind] == pytest.approx(loss, abs=1e-4)
            assert quality.loss_error[kind] > 0
            assert kl > 2 * floor > 0
            assert quality.kl[kind] == pytest.approx(kl - floor * (limit == 0), abs=1e-6)
    assert len(steps) == 2 * 2


def test_nothing_is_read_after_what_loses_too_much(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, steps = harmless_table(llm.config, BUDGET), []
    windows = {kind: [make_window(llm, kind, LENGTH, seed=0)] for kind in ("pairs", "prose")}
    monkeypatch.setattr(prefill_calibration, "ERROR_OF_DEFAULT_LOSS", 60.0)
    meter = PrefillMeter(llm, table, windows)
    for given_up_at, read in (
        ("pairs", ["pairs"]),
        ("prose", ["pairs", "prose"]),
        ("", ["prose", "pairs"]),  # what the budget before was given up at comes first
    ):
        is_hopeless = property(lambda quality, kind=given_up_at: kind in quality.loss)
        monkeypatch.setattr(PrefillQuality, "is_hopeless", is_hopeless)
        quality = meter.measure(BUDGET, on_step=lambda: steps.append(1))
        assert [list(each) for each in (quality.loss, quality.loss_error, quality.kl)] == [read] * 3
    assert len(steps) == 1 + 2 + 2


def test_long_windows_have_the_budget_of_their_length(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And products in 8 bits where the table says that these are harmless."""
    start = Mock(side_effect=[Mock(), ResourceError("enough")] * 2)
    monkeypatch.setattr(type(llm), "start_runner", start)
    harmless = RoundingQuality(length=LENGTH, kl={"prose": 0.0}, loss=0.0)
    for length, grown, rounding in ((4096, 512, None), (8192, 768, harmless)):
        table = harmless_table(llm.config, 512, rounding=rounding)
        meter = PrefillMeter(llm, table, {"prose": [zeros(length)]})
        with pytest.raises(ResourceError):
            meter.measure(512, on_step=lambda: None)
        asked = start.call_args.kwargs
        assert asked["attention"].budgets == grow_budgets(table, 512, grown)
        assert asked["is_rounded"] is (rounding is not None)
        assert asked["prefill"].max_error == 4.5


@pytest.mark.parametrize(
    ("plain_from", "long_from", "tried", "expected"),
    [
        (0, 0, [512, -512], (512, 2 * LENGTH)),
        (768, 0, [512, 768, -768], (768, 2 * LENGTH)),
        (512, 768, [512, -512, 768, -768], (768, 2 * LENGTH)),
        # What serves the shorter ones alone, by the fewest keys.
        (768, 9999, [512, 768, -768, 1024, -1024], (768, LENGTH)),
        (9999, 0, [512, 768, 1024], (1024, LENGTH)),
        (0, None, [512, -512], (512, LENGTH)),  # no room for the long ones
    ],
)
def test_more_keys_are_tried_where_few_lose_too_much(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    plain_from: int,
    long_from: int | None,
    tried: list[int],
    expected: tuple[int, int],
) -> None:
    windows, long = {"prose": [zeros(LENGTH)]}, {"pairs": [zeros(2 * LENGTH)]}
    measured, steps = [], []

    class Meter:
        def __init__(self, llm: LLM, table: BudgetTable, windows: Windows) -> None:
            ((self.kind, (window,)),) = windows.items()
            self.length = len(window)

        def measure(self, budget: int, *, on_step: Callable[[], None]) -> PrefillQuality:
            measured.append(budget if self.length == LENGTH else -budget)
            harmless_from = plain_from if self.length == LENGTH else long_from
            if harmless_from is None:
                raise ResourceError("two sessions do not fit")
            on_step()
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
    quality = find_prefill(llm, table, windows, long, on_step=lambda: steps.append(1))
    assert quality is not None
    assert (measured, (quality.budget, quality.length)) == (tried, expected)
    assert quality.is_harmless == (plain_from <= 1024)
    assert len(steps) == count_prefill_steps(windows, long, 4) == 16


def test_nothing_is_measured_where_every_budget_loses_too_much(llm: LLM) -> None:
    table = replace(harmless_table(llm.config, 512), losses={512: 0.7})
    assert find_prefill(llm, table, {}, {}, on_step=lambda: None) is None


def test_a_calibration_measures_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(["the art of the thing is that it is there"] * 400)]
    monkeypatch.setattr(calibration, "MEASURED_BUDGETS", (512, 768))
    monkeypatch.setattr(calibration, "_measure_losses", lambda *_: {512: 0.7, 768: 0.4})
    reports: list[tuple[str, int, int]] = []
    table = calibrate(
        llm,
        texts,
        length=LENGTH,
        decode=False,
        on_progress=lambda *report: reports.append(report),
    )
    assert table.prefill is not None and table.prefill.budget == 768
    assert table.prefill.kl.keys() == FEW.keys()
    _, done, total = reports[-1]
    assert done == total - 3  # the losses, which were not measured
    # What nobody asked for costs nobody a table.
    monkeypatch.setattr(calibration_windows, "make_window", Mock(side_effect=UsageError("few")))
    assert calibrate(llm, texts, length=LENGTH, decode=False).prefill is None
