"""The script that times decode calls of several tokens: what it runs, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.decode_calls import main
from tests.tiny_models import TinyModelFactory


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_every_number_of_tokens_has_a_row(
    tiny_model: TinyModelFactory,
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_model(architecture=architecture, n_layers=4)
    arguments = ["bench", str(path), "-d", "90", "--rows", "2,5", "-r", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A call of one token takes ")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:]]
    assert [row[0] for row in cells] == ["2", "5"]
    assert all(float(cell) > 0 for row in cells for cell in row[1:])


@pytest.mark.parametrize("wrong", [["--rows", "17"], ["-r", "0"], ["-d", "3", "--rows", "4"]])
def test_sizes_that_cannot_be(
    model: Path, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", str(model), "-d", "64", *wrong])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(n_layers=1)
