"""What an interrupted calibration leaves behind, and one that goes on from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgeh2o import LLM, PrefillConfig
from edgeh2o.evaluation import calibration, calibration_windows
from edgeh2o.evaluation.calibration import calibrate
from edgeh2o.evaluation.calibration_notes import CalibrationNotes
from edgeh2o.evaluation.long_texts import KINDS
from edgeh2o.evaluation.text_calibration import TextMeter
from tests.tiny_models import TinyModelFactory

VALUES = {"a": [0.1, float(1 / 3)], "b": {"c": None}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "notes.json"
    notes = CalibrationNotes(path, "a model")
    for name, value in VALUES.items():
        assert notes.recall(name, lambda value=value: value) == value
    return path


def test_what_is_noted_is_not_measured_again(path: Path) -> None:
    for notes in (CalibrationNotes(path, "a model"), CalibrationNotes(path, "a model")):
        for name, value in VALUES.items():
            assert notes.recall(name, Mock(side_effect=AssertionError)) == value
    notes.remove()
    assert not path.exists()
    notes.remove()


def test_notes_of_something_else_are_none(path: Path) -> None:
    assert CalibrationNotes(path, "another model").recall("a", lambda: 7) == 7
    assert CalibrationNotes(path, "a model").recall("a", lambda: 8) == 8


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"values": [1]}', "changed"])
def test_a_damaged_file_is_none(path: Path, content: str) -> None:
    if content == "changed":
        data = json.loads(path.read_text())
        data["values"]["a"] = "none of ours"
        content = json.dumps(data)
    path.write_text(content)
    assert CalibrationNotes(path, "a model").recall("a", lambda: 7) == 7
    assert CalibrationNotes(path, "a model").recall("a", lambda: 8) == 7


def test_notes_that_cannot_be_written_serve_those_who_made_them() -> None:
    for notes in (CalibrationNotes(Path("/dev/null/notes.json"), "a model"), CalibrationNotes()):
        assert notes.recall("a", lambda: 7) == 7
        assert notes.recall("a", lambda: 8) == 7
        notes.remove()


@pytest.mark.first
def test_an_interrupted_calibration_goes_on(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every part of the work: the table is that of one that was not interrupted."""
    monkeypatch.setattr(calibration_windows, "KINDS", {"pairs": KINDS["pairs"]})
    monkeypatch.setattr(calibration_windows, "_LONG_KINDS", ())
    path, length = tmp_path / "notes.json", 2304
    texts = [" ".join([f"the art of the thing is {i}" for i in range(n)]) for n in (900, 901)]
    model = tiny_model(tensor_type="F32", n_layers=1, context_length=4096)
    losses = {512: 0.4, 768: 0.3, 1024: 0.2, 1280: 0.1}  # else nothing else would be measured
    measure = TextMeter.measure_losses
    monkeypatch.setattr(TextMeter, "measure_losses", lambda *a: measure(*a) and losses)
    with LLM(model, prefill=PrefillConfig(batch_size=1024)) as llm:
        expected = calibrate(llm, texts, length=length)
        assert expected.prefill and expected.decode
        for interrupted in ("read", "measure_losses", "find_prefill", "find_decode"):
            with monkeypatch.context() as patch:
                owner = TextMeter if hasattr(TextMeter, interrupted) else calibration
                patch.setattr(owner, interrupted, interrupt_after(getattr(owner, interrupted)))
                with pytest.raises(KeyboardInterrupt):
                    calibrate(llm, texts, length=length, notes_path=path)
            done: list[tuple[object, ...]] = []
            table = calibrate(
                llm,
                texts,
                length=length,
                notes_path=path,
                on_progress=lambda *step, done=done: done.append(step),
            )
            assert table == expected and not path.exists(), interrupted
            _, n_done, total = done[-1]
            assert n_done == total
            assert (n_done == 0) == (interrupted == "find_decode")


def interrupt_after(work: Callable[..., object]) -> Callable[..., object]:
    def interrupt(*args: object) -> None:
        work(*args)
        raise KeyboardInterrupt

    return interrupt
