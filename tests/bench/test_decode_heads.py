"""What one KV head alone loses in decode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import decode_heads
from edgeh2o import LLM
from edgeh2o.attention.budget_table import write_table
from tests.budget_tables import harmless_table
from tests.tiny_models import TinyModelFactory


@pytest.fixture
def model(tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One whose table says that prompts may be read by 64 keys."""
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path) as llm:
        table = harmless_table(llm.config, 64)
        write_table(table, tmp_path / f"{llm.config.fingerprint}.budgets.json")
    return str(path)


def test_heads_alone_and_all_but_some(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> list[dict[str, object]]:
        argv = ["decode_heads", model, "--ctx", "2400", "--keys", "64", "-t", "1", "-o", "json"]
        monkeypatch.setattr(sys, "argv", [*argv, *options])
        assert decode_heads.main() == 0
        results: list[dict[str, object]] = json.loads(capsys.readouterr().out)["results"]
        return results

    alone = run()
    n_heads = len(alone)
    kl = [float(str(each["kl"])) for each in alone]
    assert kl == sorted(kl, reverse=True) and kl[-1] > 0
    for each in alone:
        heads = each["heads"]
        assert heads == [64 if h == int(str(each["limited"])) else None for h in range(n_heads)]
    worst = str(alone[0]["limited"])
    (others,) = run("--full", worst)
    assert others["limited"] == "all but 1"
    heads = others["heads"]
    assert isinstance(heads, list) and heads.count(64) == n_heads - 1
    assert heads[int(worst)] is None
    (all_limited,) = run("--full", str(n_heads))
    assert float(str(all_limited["kl"])) > float(str(others["kl"])) > 0


def test_short_windows_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_heads", model, "--ctx", "2303"])
    with pytest.raises(SystemExit):
        decode_heads.main()
    assert "--ctx must be at least 2304, got 2303" in capsys.readouterr().err
