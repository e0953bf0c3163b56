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
    assert count_prefill_steps(windows, long, 2) == 2 * 4 + 5 * 3
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
    meter = PrefillMeter(llm, table, {"prose": [zeros(LENGTH)]}, base)
    with pytest.raises(ResourceError):
        meter.measure(budget, on_step=lambda: None)
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
    measured, steps = [], []

    class Meter:
        def __init__(
            self, llm: LLM, table: BudgetTable, windows: Windows, base: int | None = None
        ) -> None:
            ((self.kind, (window,)),) = windows.items()
            self.length = len(window)
            assert base == (None if self.length == 4096 else expected[0])

        def measure(self, budget: int, *, on_step: Callable[[], None]) -> PrefillQuality:
            measured.append(budget if self.length == 4096 else -budget)
            harmless_from = plain_from if self.length == 4096 else long_from
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
    found = find_prefill(llm, table, windows, long, on_step=lambda: steps.append(1))
    assert (measured, [each.budget for each in found]) == (tried, expected)
    assert [each.length for each in found] == [4096, 8192][: len(expected)]
    assert found[0].is_harmless == (plain_from <= 1024)
    assert len(steps) == count_prefill_steps(windows, long, 4) == 4 + 5 * 3


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
    assert find_prefill(llm, table, windows, long, on_step=lambda: None) == (quality,)
    (_, least), (_, tried) = (call.args for call in find.call_args_list)
    assert least == [1024]
    assert tried == [1024, 1216, 1344]  # of up to 1,664
    monkeypatch.setattr(prefill_calibration, "_WORTHWHILE", 0.1)
    assert find_prefill(llm, table, windows, long, on_step=lambda: None) == (quality,)
    assert find.call_count == 3


def test_nothing_is_measured_where_every_budget_loses_too_much(llm: LLM) -> None:
    table = replace(harmless_table(llm.config, 512), losses={512: 0.7})
    assert find_prefill(llm, table, {}, {}, on_step=lambda: None) == ()


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
    assert table.prefill[0].budget == 768
    assert table.prefill[0].kl.keys() == FEW.keys()
    _, done, total = reports[-1]
    assert done == total - 3  # the losses, which were not measured
    # What nobody asked for costs nobody a table.
    monkeypatch.setattr(calibration_windows, "make_window", Mock(side_effect=UsageError("few")))
    assert calibrate(llm, texts, length=LENGTH, decode=False).prefill == ()
