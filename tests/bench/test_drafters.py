"""The script that times what drafts for one model, in a file of its own: a row for every call."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.drafters import main
from tests.drafter_cases import CASES


@pytest.mark.parametrize(("case", "n_calls"), [("assistant", 2), ("eagle3", 2), ("dflash", 3)])
def test_every_call_has_a_row(
    case: str,
    n_calls: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = map(str, CASES[case].write_both(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench", *paths, "-d", "90", "-r", "2"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows = {row[0]: row[1:] for row in cells if row[1:2] and row[1].replace(".", "").isdigit()}
    assert len(rows) == n_calls + 2
    assert rows["a token of the model"][1] == "1.000"
    monkeypatch.setattr(sys, "argv", ["bench", "a", "b", "-d", "0"])
    with pytest.raises(SystemExit):
        main()
