"""The script that times adapters: what it runs, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.lora import KINDS, main
from tests.tiny_models import TinyModelFactory


@pytest.mark.parametrize("more", [["--sequences", "1"], ["-t", "1", "--cpu-time"]])
def test_every_kind_has_a_row(
    tiny_model: TinyModelFactory,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_model(n_layers=2, vocab_size=1200)
    monkeypatch.setattr(sys, "argv", ["bench", str(path), "-d", "32", "-r", "2", *more])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-8:]]
    assert [row[0] for row in cells] == ["no adapters loaded", *KINDS]
    assert all(float(cell.split()[0]) > 0 for row in cells for cell in row[1:])


@pytest.mark.parametrize("wrong", [["--rank", "0"], ["-r", "0"], ["-t", "2", "--cpu-time"]])
def test_numbers_that_cannot_be(
    tiny_model: TinyModelFactory, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = tiny_model(n_layers=1)
    monkeypatch.setattr(sys, "argv", ["bench", str(path), *wrong])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
