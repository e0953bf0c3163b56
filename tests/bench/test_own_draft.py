"""The script that times what a model's own layer drafts: what it runs, and what it refuses."""

from __future__ import annotations

import sys

import pytest

from bench.own_draft import main
from edgeh2o.errors import UsageError
from tests.tiny_models import TinyModelFactory


def test_every_call_has_a_row(
    tiny_model: TinyModelFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_model(architecture="qwen35", n_layers=2, n_drafting_layers=1)
    monkeypatch.setattr(sys, "argv", ["bench", str(path), "-d", "90", "-r", "2"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows = {row[0]: row[1:] for row in cells if row[1:2] and row[1].replace(".", "").isdigit()}
    assert len(rows) == 7
    assert rows["a token of the model"][1] == "1.000"
    assert all(float(cell) > 0 for row in rows.values() for cell in row)


def test_what_cannot_be_measured(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(architecture="qwen35", n_layers=2)
    monkeypatch.setattr(sys, "argv", ["bench", str(path), "-d", "0"])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    monkeypatch.setattr(sys, "argv", ["bench", str(path), "-d", "64"])
    with pytest.raises(UsageError, match="no layer that guesses tokens ahead"):
        main()
