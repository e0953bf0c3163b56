"""KV heads that spoil a decode by few keys are found, and read everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig
from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.engine.calibration import read_densely
from edgeh2o.engine.decode_probe import DecodeProbe
from edgeh2o.errors import ResourceError
from edgeh2o.evaluation import decode_heads
from edgeh2o.evaluation.calibration_notes import CalibrationNotes
from edgeh2o.evaluation.calibration_windows import Windows
from edgeh2o.evaluation.decode_heads import WindowDecoder, count_head_steps, find_heads
from edgeh2o.evaluation.decode_meter import DECODED, DecodeMeter
from edgeh2o.evaluation.long_texts import make_window
from tests.budget_tables import table_of_model
from tests.evaluation.counted import Counted
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

LENGTH, KEYS = 2400, 64
BAD = 2
N_HEADS = 4
# Of what a KV head's output adds to the stream: head 2 is the first of the second layer.
WEIGHTS = (0.005, 0.02, 8.0, 0.1)
MOST_ROWS = 0.75 * (LENGTH - DECODED)


def _weigh_heads(tensors: Tensors) -> None:
    for layer in range(2):
        weights = tensors[f"blk.{layer}.attn_output.weight"]
        size = weights.shape[1] // 2
        for head in range(2):
            weights[:, head * size : (head + 1) * size] *= WEIGHTS[2 * layer + head]


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    """A model of two layers of two KV heads, one of which matters far more than the others."""
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4800, edit=_weigh_heads)
    with LLM(path, prefill=PrefillConfig(batch_size=512, chunk_size=64)) as llm:
        assert llm.config.n_slots == N_HEADS
        yield llm


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What heads with a limit have."""
    monkeypatch.setattr(decode_heads, "_KEYS", KEYS)
    monkeypatch.setattr(decode_heads, "_KEYS_SHARE", 0)


def _table(llm: LLM) -> BudgetTable:
    sizes = {"chunk_size": 64, "length": LENGTH, "mean_past": 2000.0, "levels": (KEYS, 128)}
    return table_of_model(llm.config, ((1.0, 0.5),), **sizes)


def _windows(llm: LLM, length: int = LENGTH) -> Windows:
    return {kind: [make_window(llm, kind, length)] for kind in ("pairs", "prose")}


def _find(
    llm: LLM,
    notes: CalibrationNotes,
    *,
    long: Windows | None = None,
    counted: Counted | None = None,
    most_rows: float = MOST_ROWS,
) -> DecodeQuality | None:
    windows = _windows(llm)
    steps = (counted or Counted()).steps(count_head_steps(windows, long or {}))
    return find_heads(
        llm,
        _table(llm),
        KEYS,
        windows,
        long or {},
        steps,
        notes,
        kind="pairs",
        most_rows=most_rows,
    )


def test_errors_tell_heads_apart_as_runs_do_that_limit_one_of_them(llm: LLM) -> None:
    window = make_window(llm, "pairs", LENGTH)
    rule = HeadwiseConfig(budgets=(None,) * N_HEADS)
    errors = {}
    for keys in (KEYS, LENGTH):
        probe = DecodeProbe(
            llm.model, LENGTH, LENGTH - DECODED, keys, threads=llm.threads, rule=rule
        )
        read_densely(llm.model, window, llm.threads, probe)
        errors[keys] = probe.errors
    assert errors[KEYS].shape == (N_HEADS,)
    assert np.all(errors[LENGTH] == 0) and np.all(errors[KEYS] > 0)
    decoder = WindowDecoder(llm, rule, window, DECODED)
    alone = [
        float(decoder.compare([KEYS if h == head else None for h in range(N_HEADS)]).kl.mean())
        for head in range(N_HEADS)
    ]
    for find in (np.argmin, np.argmax):
        assert find(errors[KEYS]) == find(alone)
    assert int(np.argmax(alone)) == BAD
    assert decoder.compare([None] * N_HEADS).kl.mean() == pytest.approx(0, abs=1e-6)


@pytest.mark.usefixtures("few_keys")
def test_the_head_that_spoils_decode_reads_everything(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other does; what was measured holds for the budgets that are noted."""
    notes, counted = CalibrationNotes(), Counted()
    quality = _find(llm, notes, counted=counted)
    assert quality is not None
    assert quality.heads == tuple(None if h == BAD else KEYS for h in range(N_HEADS))
    assert (quality.budget, quality.length) == (KEYS, LENGTH)
    assert quality.is_harmless and quality.kl.keys() == {"pairs", "prose"}
    assert counted.done == 2 * 2 + 2 * 2
    meter = DecodeMeter(llm, _table(llm), KEYS, _windows(llm), Counted().steps(8), notes)
    everyone = meter.measure_heads((KEYS,) * N_HEADS, KEYS)
    assert not everyone.is_harmless
    # What is noted is not measured again.
    for name in ("WindowDecoder", "DecodeProbe"):
        monkeypatch.setattr(decode_heads, name, Mock(side_effect=AssertionError))
    monkeypatch.setattr(DecodeMeter, "_measure_kind", Mock(side_effect=AssertionError))
    assert _find(llm, notes) == quality


@pytest.mark.usefixtures("few_keys")
def test_heads_of_longer_prompts_serve_both_lengths(llm: LLM) -> None:
    """They are chosen by the longer windows; a kind's divergence is the larger one."""
    long = {"pairs": [make_window(llm, "pairs", 2 * LENGTH)]}
    notes, counted = CalibrationNotes(), Counted()
    quality = _find(llm, notes, long=long, counted=counted, most_rows=LENGTH)
    assert quality is not None and quality.heads is not None
    assert quality.heads[BAD] is None and KEYS in quality.heads
    assert (quality.length, quality.kl.keys()) == (2 * LENGTH, {"pairs", "prose"})
    assert counted.done == 2 * 4 + 4 + 2 * 2
    parts = [
        DecodeMeter(llm, _table(llm), KEYS, windows, Counted().steps(0), notes).measure_heads(
            quality.heads, KEYS
        )
        for windows in (long, _windows(llm))
    ]
    assert quality.kl["pairs"] == max(part.kl["pairs"] for part in parts)
    assert quality.kl["prose"] == parts[1].kl["prose"]


@pytest.mark.usefixtures("few_keys")
def test_no_heads_are_named_where_that_is_of_no_use(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much would be read, another kind of text loses too much, or memory does not suffice."""
    notes = CalibrationNotes()
    n_limited = KEYS + 256 + LENGTH / 64
    assert _find(llm, notes, most_rows=n_limited) is None  # as if all had a limit
    assert _find(llm, notes, most_rows=KEYS) is None
    with monkeypatch.context() as patch:
        tried: list[tuple[int | None, ...]] = []
        measure = DecodeMeter.measure_heads

        def lose(meter: DecodeMeter, heads: tuple[int | None, ...], budget: int) -> DecodeQuality:
            tried.append(heads)
            quality = measure(meter, heads, budget)
            return replace(quality, kl={**quality.kl, "code": 1.0})

        patch.setattr(DecodeMeter, "measure_heads", lose)
        patch.setattr(decode_heads, "_SHARES", (1 / 2, 0))
        assert _find(llm, notes) is None
        # Where the first ones lose too much, more heads read everything.
        assert [heads.count(None) for heads in tried] == sorted({h.count(None) for h in tried})
        assert tried[0][BAD] is None
    monkeypatch.setattr(DecodeMeter, "measure_heads", Mock(side_effect=ResourceError("too much")))
    assert _find(llm, notes) is None
