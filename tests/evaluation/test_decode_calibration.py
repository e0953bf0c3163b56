"""What ``calibrate`` measures of decode by a table's budgets, less what rounding does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig
from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.evaluation import (
    calibration,
    calibration_windows,
    decode_calibration,
    decode_meter,
)
from edgeh2o.evaluation.calibration import calibrate
from edgeh2o.evaluation.calibration_notes import CalibrationNotes
from edgeh2o.evaluation.calibration_windows import Windows, make_windows
from edgeh2o.evaluation.decode_calibration import (
    count_decode_steps,
    find_decode,
    require_decodable,
)
from edgeh2o.evaluation.decode_heads import count_head_steps
from edgeh2o.evaluation.decode_meter import DECODED, DecodeMeter
from edgeh2o.evaluation.decoding import compare_decodes
from edgeh2o.evaluation.long_texts import KINDS, make_window
from edgeh2o.evaluation.text_calibration import TextMeter, count_reading_steps
from tests.budget_tables import table_of_model
from tests.evaluation.counted import Counted
from tests.tiny_models import TinyModelFactory

LENGTH, BUDGET = 2400, 64
FULL = ResourceError("three sessions do not fit")
FEW = {kind: KINDS[kind] for kind in ("prose", "pairs")}
EMPTY = {"pairs": [np.zeros(LENGTH, np.int32)] * 2, "prose": [np.zeros(LENGTH, np.int32)] * 2}
LONG_LENGTH = 2 * LENGTH
LONG_PROMPT = LONG_LENGTH - DECODED
LONG = {"pairs": [np.zeros(LONG_LENGTH, np.int32)]}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path, prefill=PrefillConfig(batch_size=512, chunk_size=64)) as llm:
        yield llm


def _table(llm: LLM, *, by_query_head: bool) -> BudgetTable:
    sizes = {"chunk_size": 64, "length": LENGTH, "mean_past": 2000.0, "levels": (BUDGET, 128)}
    table = table_of_model(llm.config, ((1.0, 0.5),), **sizes)
    if not by_query_head:
        return table
    group = llm.config.n_heads // llm.config.n_kv_heads
    errors = tuple(row for row in table.errors for _ in range(group))
    return replace(table, n_heads=llm.config.n_heads, errors=errors)


@pytest.mark.parametrize("by_query_head", [False, True])
def test_decode_is_measured_on_every_kind(
    by_query_head: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less what rounding does, where more than the limit is lost."""
    monkeypatch.setattr(calibration_windows, "KINDS", FEW)
    monkeypatch.setattr(DecodeQuality, "is_harmless", True)  # random weights lose what they lose
    table, texts = _table(llm, by_query_head=by_query_head), make_windows(llm, LENGTH)
    measured = {}
    for limit in (0.0, np.inf):
        monkeypatch.setattr(decode_meter, "kl_limit", lambda _, limit=limit: limit)
        counted = Counted()
        meter = DecodeMeter(llm, table, BUDGET, texts, counted.steps(48), CalibrationNotes())
        measured[limit] = meter.measure(BUDGET)
        assert counted.done == 8
    assert count_decode_steps(texts, {}) == 3 * 8 + count_head_steps(texts, {})
    for quality in measured.values():
        assert (quality.budget, quality.length, quality.kl.keys()) == (BUDGET, LENGTH, FEW.keys())
    n_heads = llm.config.n_layers * llm.config.n_kv_heads
    kept = round(7 / 8 * (LENGTH - DECODED)) - 256
    sparse = HeadwiseConfig(
        budgets=table.budgets(BUDGET), by_query_head=by_query_head, decode_attention="dense"
    )
    for kind in FEW:
        divergences = []
        for each in (table.of_kv_heads().budgets(BUDGET), (kept, *[None] * (n_heads - 1))):
            rule = replace(sparse, decode_attention="headwise", decode_budgets=each)
            runners = [llm.start_runner(LENGTH, attention=way) for way in (sparse, rule)]
            windows = [make_window(llm, kind, LENGTH, seed=seed) for seed in (0, 1)]
            scores = [
                compare_decodes(runners, window, DECODED, on_tokens=lambda _: None)[0]
                for window in windows
            ]
            divergences.append(np.mean([each.kl.mean() for each in scores]))
        by_budgets, rounding = divergences
        assert by_budgets > rounding > 0
        for limit, quality in measured.items():
            expected = by_budgets - rounding * (limit == 0)
            assert quality.kl[kind] == pytest.approx(expected, abs=1e-6), limit


def test_nothing_is_decoded_after_what_loses_too_much(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_windows, "KINDS", FEW)
    monkeypatch.setattr(DecodeQuality, "is_harmless", False)
    counted = Counted()
    table, windows = _table(llm, by_query_head=False), make_windows(llm, LENGTH)
    meter = DecodeMeter(llm, table, BUDGET, windows, counted.steps(48), CalibrationNotes())
    assert (list(meter.measure(BUDGET).kl), counted.done) == (["pairs"], 2 * 2)


def test_kinds_that_are_noted_are_not_decoded_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_windows, "KINDS", FEW)
    monkeypatch.setattr(DecodeQuality, "is_harmless", True)
    table, windows, notes = (
        _table(llm, by_query_head=False),
        make_windows(llm, LENGTH),
        CalibrationNotes(),
    )
    for n_steps in (8, 0):
        counted = Counted()
        DecodeMeter(llm, table, BUDGET, windows, counted.steps(48), notes).measure(BUDGET)
        assert counted.done == n_steps


class _Measured:
    """Stands for what ``DecodeMeter`` measures, of budgets that are harmless from some number on.

    Of windows of twice the length where ``long_from`` says it. Heads that read everything are
    looked for ``after`` so many tries, by what is ``asked`` then; ``by_heads`` is what is found.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        harmless_from: int,
        long_from: int,
        by_heads: DecodeQuality | None = None,
    ) -> None:
        self.tried: list[tuple[int, int]] = []  # length, budget
        self.after: list[int] = []
        self.asked: dict[str, object] = {}
        measured = self

        def find(*_: object, **asked: object) -> DecodeQuality | None:
            measured.after.append(len(measured.tried))
            measured.asked = asked
            return by_heads

        monkeypatch.setattr(decode_calibration, "find_heads", find)

        def measure(meter: DecodeMeter, budget: int) -> DecodeQuality:
            is_long = meter.length == LONG_LENGTH
            measured.tried.append((meter.length, budget))
            meter._steps.advance(4 if is_long else 8)
            is_harmless = budget >= (long_from if is_long else harmless_from)
            kinds = ("pairs", "facts") if is_long else ("pairs", "prose")
            kl = dict.fromkeys(kinds, (2e-3 if is_long else 1e-3) if is_harmless else 1.0)
            return DecodeQuality(budget=budget, length=meter.length, kl=kl)

        monkeypatch.setattr(DecodeMeter, "measure", measure)


@pytest.mark.parametrize(
    ("budget", "harmless_from", "tried"),
    [
        (512, 700, [1024]),
        (512, 1500, [1024, 1280, 1536]),
        (512, 9999, [1024, 1280, 1536]),
        (1280, 1200, [1280]),
        (1280, 1500, [1280, 1536]),
    ],
)
def test_more_keys_are_tried_where_few_lose_too_much(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    harmless_from: int,
    tried: list[int],
) -> None:
    counted = Counted(count_decode_steps(EMPTY, {}) * llm.config.n_layers)
    measured = _Measured(monkeypatch, harmless_from, 0)
    table = _table(llm, by_query_head=False)
    quality = find_decode(llm, table, budget, EMPTY, {}, counted.progress, CalibrationNotes())
    assert (measured.tried, quality.budget) == ([(LENGTH, keys) for keys in tried], tried[-1])
    assert quality.is_harmless == (tried[-1] >= harmless_from)
    assert counted.done == counted.total == 8 * len(tried) * llm.config.n_layers


@pytest.mark.parametrize(
    ("harmless_from", "long_from", "tried", "budget"),
    [
        (700, 700, [1024], 1024),
        (700, 1500, [1024, 1280, 1536], 1536),
        (1200, 2000, [1280, 1536, 1792, 2048], 2048),
        (1200, 9999, [1280, 1536, 1792, 2048], 1280),
        (9999, 700, [], 1536),
    ],
)
def test_twice_the_length_may_need_more_keys(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    harmless_from: int,
    long_from: int,
    tried: list[int],
    budget: int,
) -> None:
    """The table says what is harmless after both, else only what is after the shorter one."""
    monkeypatch.setattr(DecodeMeter, "count_rows", lambda *_: 0.75 * LONG_PROMPT)
    counted = Counted(count_decode_steps(EMPTY, LONG) * llm.config.n_layers)
    measured = _Measured(monkeypatch, harmless_from, long_from)
    table = _table(llm, by_query_head=False)
    quality = find_decode(llm, table, 512, EMPTY, LONG, counted.progress, CalibrationNotes())
    assert [keys for length, keys in measured.tried if length == LONG_LENGTH] == tried
    serves_both = bool(tried) and tried[-1] >= long_from
    assert (quality.budget, quality.length) == (budget, LONG_LENGTH if serves_both else LENGTH)
    assert quality.is_harmless == (harmless_from < 9999)
    if serves_both:
        assert quality.kl == {"pairs": 2e-3, "prose": 1e-3, "facts": 2e-3}
    assert counted.done == counted.total


def test_no_more_keys_than_are_worth_it_are_tried(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what memory does not suffice for a reason to know nothing of the shorter length."""
    measured = _Measured(monkeypatch, 700, 9999)
    table = _table(llm, by_query_head=False)
    find = partial(find_decode, llm, table, 512, EMPTY, LONG, Counted().progress)
    with monkeypatch.context() as patch:
        patch.setattr(
            DecodeMeter,
            "count_rows",
            lambda self, keys: keys + 0.75 * LONG_PROMPT - 1400,
        )
        assert find(CalibrationNotes()).length == LENGTH
        assert measured.tried == [(LENGTH, 1024), (LONG_LENGTH, 1024), (LONG_LENGTH, 1280)]
        patch.setattr(DecodeMeter, "count_rows", Mock(side_effect=FULL))
        assert find(CalibrationNotes()).length == LENGTH


@pytest.mark.parametrize(
    ("harmless_from", "long_from", "windows", "after", "kind", "most_rows"),
    [
        # Where no number of keys is harmless, of which more are tried only if no heads are found.
        (9999, 0, LONG, 3, None, 0.75 * LONG_PROMPT),
        (9999, 0, {}, 3, "prose", 0.75 * (LENGTH - DECODED)),
        (1200, 9999, LONG, 3, "facts", 0.75 * LONG_PROMPT),
        # Not where it is.
        (1200, 1200, LONG, None, None, 0.0),
        (1200, 0, {}, None, None, 0.0),
    ],
)
def test_heads_that_read_everything_come_before_more_keys(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    harmless_from: int,
    long_from: int,
    windows: Windows,
    after: int | None,
    kind: str | None,
    most_rows: float,
) -> None:
    heads = (None,) * (llm.config.n_slots - 1) + (2048,)
    by_heads = DecodeQuality(budget=2048, length=LONG_LENGTH, kl={"pairs": 0.0}, heads=heads)
    measured = _Measured(monkeypatch, harmless_from, long_from, by_heads)
    table = _table(llm, by_query_head=False)
    counted = Counted(count_decode_steps(EMPTY, windows) * llm.config.n_layers)
    notes = CalibrationNotes()
    quality = find_decode(llm, table, 512, EMPTY, windows, counted.progress, notes)
    assert measured.after == ([] if after is None else [after])
    assert (quality == by_heads) == (after is not None)
    assert len(measured.tried) == (after or len(measured.tried))
    assert counted.done == counted.total
    if after is not None:
        assert measured.asked == {"kind": kind, "most_rows": most_rows}


def test_heads_are_to_spare_more_rows_than_the_shorter_length_does(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = _Measured(monkeypatch, 700, 9999)
    monkeypatch.setattr(DecodeMeter, "count_rows", lambda *_: 100.0)
    table = _table(llm, by_query_head=False)
    find_decode(llm, table, 512, EMPTY, LONG, Counted().progress, CalibrationNotes())
    spared = LENGTH - DECODED - 100.0
    assert measured.asked == {"kind": "facts", "most_rows": LONG_PROMPT - spared}


@pytest.mark.parametrize("base", [64, 100])
def test_longer_prompts_are_measured_by_the_budgets_that_they_have(
    base: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a default run: limits of prompts and of generated tokens grow alike."""
    table = replace(_table(llm, by_query_head=False), length=4096, levels=(64, 128))
    table = replace(table, losses={base: 0.0}, texts=("none",))
    quality = DecodeQuality(budget=BUDGET, length=2 * 4096, kl={"pairs": 0.0})
    windows = {"pairs": [np.zeros(2 * 4096, np.int32)]}
    meter = DecodeMeter(llm, table, base, windows, Counted().steps(0), CalibrationNotes())
    monkeypatch.setattr(
        "edgeh2o.attention.head_budgets.find_table",
        lambda _: (replace(table, decode=quality), "cache"),
    )
    settings = HeadwiseConfig()
    resolved = settings.resolved(llm.config)
    run = settings.with_budget(resolved, llm.config, resolved.found.mean_for(2 * 4096))
    tried = meter._by(BUDGET)
    assert tried.budgets == run.budgets
    assert tried.decode_budgets == run.decode_budgets
    assert max(b for b in tried.decode_budgets if b) > 64
    assert meter.count_rows(BUDGET) == np.mean(tried.decode_rows(2 * 4096 - DECODED))


def test_a_calibration_measures_decode(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many keys as a default run has, at least; without a budget nothing is measured."""
    monkeypatch.setattr(calibration_windows, "KINDS", FEW)
    monkeypatch.setattr(decode_calibration, "_BUDGETS", (1024,))
    monkeypatch.setattr(calibration, "find_prefill", lambda *_, **__: ())
    for module, name in ((calibration, "count_prefill_steps"), (calibration, "count_loss_steps")):
        monkeypatch.setattr(module, name, lambda *_: 0)
    texts = [" ".join(["the art of the thing is that it is there"] * 400)]
    losses = {512: 0.7, 768: 0.4, 1024: 0.1}
    monkeypatch.setattr(TextMeter, "measure_losses", lambda *_: losses)
    assert calibrate(llm, texts, length=LENGTH, decode=False).decode is None
    assert calibrate(llm, texts, length=2303).decode is None
    reports: list[tuple[str, int, int]] = []
    table = calibrate(llm, texts, length=LENGTH, on_progress=lambda *report: reports.append(report))
    assert table.n_heads == llm.config.n_heads
    assert table.decode is not None
    assert (table.decode.budget, table.decode.length) == (1024, LENGTH)
    n_steps = count_decode_steps(EMPTY, {}) + count_reading_steps(llm, 1)
    _, done, total = reports[-1]
    assert done == total <= n_steps * llm.config.n_layers
    assert any(kl > 0 for kl in table.decode.kl.values())
    # What was not asked for costs nobody a table.
    few = UsageError("too few")
    for module, name, error in (
        (calibration_windows, "make_window", few),
        (DecodeMeter, "measure", FULL),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Mock(side_effect=error))
            assert calibrate(llm, texts, length=LENGTH).decode is None
            with pytest.raises(type(error)):
                calibrate(llm, texts, length=LENGTH, decode=True)
    require_decodable(2304)
    with pytest.raises(UsageError, match="at least 2304 tokens, got 2303"):
        calibrate(llm, texts, length=2303, decode=True)
    monkeypatch.setattr(TextMeter, "measure_losses", lambda *_: {512: 0.7})
    assert calibrate(llm, texts, length=LENGTH, decode=True).decode is None
