"""The table that compares all rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import rules
from edgeh2o.attention.registry import sparse_attention_algorithms
from tests.tiny_models import TinyModelFactory


def test_no_rule_is_missing() -> None:
    shown = {attention.algorithm for attention in rules.RULES.values()}
    assert shown >= {name for name in sparse_attention_algorithms() if "_" not in name}


def test_rules_are_compared_on_the_same_window(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All that is said twice is said twice. " * 100)
    model = tiny_model(n_layers=2, model_dim=64, head_dim=16, n_heads=2, n_kv_heads=1, ffn_dim=64)
    options = ["--text", f"twice={text}", "--ctx", "1300", "--rounds", "1", "-t", "1", "-o", "json"]
    options += ["--rules", "dense,quest,chunks"]
    monkeypatch.setattr(sys, "argv", ["rules", str(model), *options])
    main: Callable[[], int] = rules.main
    assert main() == 0
    results = json.loads(capsys.readouterr().out)["results"]
    names = ["dense", "quest", "ruvllm in chunks of 64"]
    assert [row["rule"] for row in results] == 2 * names
    dense, quest, ruvllm = results[:3]
    assert dense["decoded"]["kl"] == pytest.approx(0, abs=1e-9)
    assert dense["prompt"] is None
    # A prompt that is shorter than what Quest reads of it.
    assert quest["decoded"]["kl"] == pytest.approx(0, abs=1e-9)
    assert ruvllm["decoded"]["kl"] > 0
    assert ruvllm["prompt"]["tokens"] == 1300 - 1 - 1024
    assert ruvllm["keys_per_query"] < dense["keys_per_query"] / 2
    assert ruvllm["bytes_per_token"] < dense["bytes_per_token"] / 5
    assert all(row["prefill_tps"] > 0 and row["decode_tps"] > 0 for row in results[3:])
