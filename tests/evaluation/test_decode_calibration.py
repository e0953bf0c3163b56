"""What ``calibrate --decode`` measures: decode by a table's budgets, less what rounding does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig
from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.errors import UsageError
from edgeh2o.evaluation import calibration, decode_calibration
from edgeh2o.evaluation.calibration import calibrate
from edgeh2o.evaluation.decode_calibration import DECODED, count_decode_steps, measure_decode
from edgeh2o.evaluation.decoding import compare_decodes
from edgeh2o.evaluation.long_texts import KINDS, make_window
from edgeh2o.evaluation.rounding_calibration import count_rounding_steps
from tests.budget_tables import table_of_model
from tests.tiny_models import TinyModelFactory

LENGTH, BUDGET = 2400, 64
FEW = {kind: KINDS[kind] for kind in ("prose", "pairs")}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path, prefill=PrefillConfig(batch_size=512, chunk_size=64)) as llm:
        yield llm


def _table(llm: LLM) -> BudgetTable:
    sizes = {"chunk_size": 64, "length": LENGTH, "mean_past": 2000.0, "levels": (BUDGET, 128)}
    return table_of_model(llm.config, ((1.0, 0.5),), **sizes)


def test_decode_is_measured_on_every_kind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_calibration, "KINDS", FEW)
    table, steps = _table(llm), []
    quality = measure_decode(llm, table, BUDGET, LENGTH, on_step=lambda: steps.append(1))
    assert len(steps) == count_decode_steps() == 8
    assert (quality.budget, quality.length, list(quality.kl)) == (BUDGET, LENGTH, list(FEW))
    budgets = table.budgets(BUDGET)
    n_heads = llm.config.n_layers * llm.config.n_kv_heads
    kept = round(7 / 8 * (LENGTH - DECODED)) - 64
    for kind, kl in quality.kl.items():
        divergences = []
        for each in (budgets, (kept, *[None] * (n_heads - 1))):
            runners = [
                llm.start_runner(
                    LENGTH, attention=HeadwiseConfig(budgets=each, decode_attention=way)
                )
                for way in ("dense", "headwise")
            ]
            windows = [make_window(llm, kind, LENGTH, seed=seed) for seed in (0, 1)]
            scores = [
                compare_decodes(runners, window, DECODED, on_tokens=lambda _: None)
                for window in windows
            ]
            divergences.append(np.mean([each.kl.mean() for each in scores]))
        rule, rounding = divergences
        assert rule > rounding > 0
        assert kl == pytest.approx(rule - rounding, abs=1e-6)


def test_a_calibration_may_measure_decode(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By KV heads, with the budget that a default run takes; without one nothing is measured."""
    monkeypatch.setattr(decode_calibration, "KINDS", FEW)
    texts = [" ".join(["the art of the thing is that it is there"] * 400)]
    table = calibrate(llm, texts, length=LENGTH)
    assert (table.n_heads, table.decode) == (llm.config.n_heads, None)
    losses = {512: 0.7, 768: 0.4, 1024: 0.1}
    monkeypatch.setattr(calibration, "_measure_losses", lambda *_: losses)
    reports: list[tuple[str, int, int]] = []
    table = calibrate(
        llm, texts, length=LENGTH, decode=True, on_progress=lambda *report: reports.append(report)
    )
    assert table.n_heads == 0 and len(table.errors) == llm.config.n_slots
    assert table.decode is not None
    assert (table.decode.budget, table.decode.length) == (768, LENGTH)
    n_steps = llm.config.n_layers + 8 + count_rounding_steps(llm, 1)
    assert sum(stage == "calibrate" for stage, _, _ in reports) == n_steps
    assert any(kl > 0 for kl in table.decode.kl.values())
    with pytest.raises(UsageError, match="at least 2304 tokens, got 2303"):
        calibrate(llm, texts, length=2303, decode=True)
    monkeypatch.setattr(calibration, "_measure_losses", lambda *_: {512: 0.7})
    assert calibrate(llm, texts, length=LENGTH, decode=True).decode is None
