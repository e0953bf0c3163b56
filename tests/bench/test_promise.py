"""A small version of ``bench.promise``: what a model without a table loses by default.

Measured with AVX512-VNNI on key-value pairs of 3,072 tokens, the kind that asks for most: the first
prompt +0.1 +- 0.5 %, KL 5.2e-3, 17 heads read densely, the second -0.5 +- 0.7 %, 7.5e-3, 10. With
AVX2 +0.5 +- 0.4 %, 5.3e-3, 17 and +0.3 +- 0.5 %, 5.3e-3, 10.
"""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from bench.promise import Loss, make_table, measure_chat, measure_windows
from edgeh2o import _core, isa
from edgeh2o.engine import payoff

pytestmark = pytest.mark.skipif(
    isa.active() == "scalar", reason="takes minutes with scalar kernels"
)


def test_the_first_prompts_keep_the_promise(smollm2_path: Path) -> None:
    args = Namespace(threads=None, ctx=3072, kinds=("pairs",), text_seeds=(0,), onnx=None)
    losses = {loss.prompt: loss for loss in measure_windows(smollm2_path, args)}
    densely = [losses.pop(prompt) for prompt in list(losses) if prompt.endswith("by default")]
    assert list(losses) == ["first prompt", "second prompt"]
    assert len(densely) == (2 if "int8" in _core.attention_precisions() else 0)
    for loss in densely:
        assert loss.loss_percent < 0.5 + 2 * loss.loss_percent_error < 2
        assert loss.kl is not None and loss.kl < 12e-3
        assert loss.attention_error_percent < 0.01 and loss.dense_reads == 0
    for loss in losses.values():
        assert loss.loss_percent < 0.5 + 2 * loss.loss_percent_error < 2
        assert loss.kl is not None and 4e-3 < loss.kl < 12e-3
        assert 0.5 < loss.attention_error_percent < 2.5  # 1 % for early layers, 4 % for late ones
        assert 0 < loss.dense_reads < 40


def test_a_chat_keeps_the_promise(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)  # dense would be as fast
    args = Namespace(threads=None, document=3000)
    loss = measure_chat(smollm2_path, args, 0)
    assert loss.loss_percent < 0.5 + 2 * loss.loss_percent_error < 3
    assert 0 < loss.attention_error_percent < 2.5  # in calls of 1,024 tokens


def test_windows_of_a_kind_share_a_row() -> None:
    differences = np.array([0.01, 0.03, -0.01, 0.01])
    losses = [
        Loss.of(
            "chat", "dialogue", 0, differences, kl=None, attention_error_percent=1.0, dense_reads=2
        ),
        Loss.of(
            "first prompt",
            "pairs",
            0,
            differences,
            kl=0.5,
            attention_error_percent=2.0,
            dense_reads=0,
        ),
        Loss.of(
            "first prompt",
            "pairs",
            1,
            -differences,
            kl=0.7,
            attention_error_percent=3.0,
            dense_reads=1,
        ),
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in make_table(losses).splitlines()
    ]
    assert rows[2][:3] == ["pairs", "first prompt", "2"]
    assert rows[2][4:] == ["0.6000", "2.5", "1"]
    assert rows[3] == ["dialogue", "chat", "1", "+1.01 +- 0.82", "-", "1.0", "2"]
