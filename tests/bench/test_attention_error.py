"""The measured error of the attention beside the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from bench import attention_error
from bench.attention_error import rank_correlation
from tests.tiny_models import TinyModelFactory


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 10], [0.1, 5.0, 6.0, 900.0]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Equal values share the mean of their ranks: (1, 2.5, 2.5, 4) against (1, 2, 3, 4).
    expected = np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1]
    assert rank_correlation([1, 7, 7, 9], [1, 2, 3, 4]) == pytest.approx(expected)


def test_more_keys_err_less(
    tiny_model: TinyModelFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(tiny_model(context_length=1024))
    options = ["--ctx", "700", "--scored", "100", "--budgets", "16,256", "--kinds", "pairs"]
    monkeypatch.setattr(sys, "argv", ["attention_error", model, *options, "-t", "1"])
    main: Callable[[], int] = attention_error.main
    assert main() == 0
    out = capsys.readouterr().out
    rows = [line.split("|") for line in out.splitlines() if line.startswith("| pairs")]
    assert [int(row[3]) for row in rows] == [256, 16]
    assert 0 < float(rows[0][4]) < float(rows[1][4])
    assert "Rank correlation of the error with the loss: " in out
