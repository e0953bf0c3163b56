"""Losses past the context, by every way to make room."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import past_context
from tests.tiny_models import TinyModelFactory


def test_every_way_scores_the_same_tokens(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All that is said twice is said twice. " * 60)
    options = ["--text", f"twice={text}", "-c", "96", "-t", "1", "-o", "json"]
    monkeypatch.setattr(sys, "argv", ["past_context", str(tiny_model()), *options])
    main: Callable[[], int] = past_context.main
    assert main() == 0
    results = {row["way"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert list(results) == ["evict", "shift", "half", "half keep 4", "recent", "everything"]
    losses = {row["loss"] for row in results.values()}
    assert len(losses) == len(results)
    assert all(0 < loss < 20 for loss in losses)
    assert results["half"]["difference_percent"] is None
    difference = results["evict"]["loss"] / results["half"]["loss"] - 1
    assert results["evict"]["difference_percent"] == pytest.approx(100 * difference)
