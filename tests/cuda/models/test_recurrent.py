"""Models with recurrent layers on the host device: what a session keeps, and goes back to.

test_architectures.py has their tokens, tests/model/test_recurrent.py what holds on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.base import RunnerState
from tests.cuda.host_library import SMALL
from tests.cuda.models.greedy import LOGIT_TOLERANCE, SHAPE
from tests.model.model_pair import random_tokens, relative_error
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")
BATCH = 8
SIZES = replace(SHAPE, max_context=32, batch_size=BATCH, chunk_size=8, all_rows=False)
TOKENS = random_tokens(2 * BATCH)


@pytest.fixture(params=["qwen35", "falcon-h1"])
def path(tiny_model: TinyModelFactory, request: pytest.FixtureRequest) -> Path:
    """Of a layer with a delta net and one that attends, or of Mamba-2 beside attention."""
    return tiny_model(**SMALL, architecture=request.param)


def start(path: Path, n: int, *, on_device: bool = True) -> list[Any]:
    """So many sessions of a model that is loaded once."""
    with open_model(path, open_device(0) if on_device else None) as file:
        model = file.load()
    return [model.start_session(DenseConfig(), SIZES) for _ in range(n)]


def read(runner: Any) -> list[Any]:
    """Marks, reads a batch, marks, reads the rest and two tokens; all logits."""
    assert runner.mark()
    assert runner.prefill(TOKENS[:BATCH], is_last=False) is None
    assert runner.mark()
    logits = [np.array(runner.prefill(TOKENS[BATCH:], is_last=True, stays_open=True))]
    return logits + [np.array(runner.decode(token)) for token in (5, 6)]


def test_a_session_goes_back_to_its_marks_and_begins_anew(path: Path) -> None:
    """Also from a call that was interrupted."""

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    (runner,) = start(path, 1)
    (on_cpu,) = start(path, 1, on_device=False)
    logits, expected = read(runner), read(on_cpu)
    for ours, theirs in zip(logits, expected, strict=True):
        assert relative_error(ours, theirs) < LOGIT_TOLERANCE
    assert runner.marks == on_cpu.marks == [0, BATCH, 2 * BATCH]
    assert runner.find_mark(2 * BATCH + 1) == 2 * BATCH  # of an answer only its end is left
    runner.rewind(2 * BATCH)
    np.testing.assert_array_equal(runner.decode(5), logits[1])
    runner.rewind(BATCH)
    with pytest.raises(KeyboardInterrupt):
        runner.prefill(TOKENS[BATCH:], is_last=True, on_layer=interrupt)
    with pytest.raises(ValueError, match="interrupted"):
        runner.mark()
    runner.rewind(BATCH)
    np.testing.assert_array_equal(runner.prefill(TOKENS[BATCH:], is_last=True), logits[0])
    runner.reset()
    for ours, theirs in zip(read(runner), logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_saved_prompt_goes_on_on_either_device(path: Path) -> None:
    runners = [start(path, 2, on_device=on_device) for on_device in (False, True)]
    for first, _ in runners:
        read(first)
    for (saved, _), (_, restored) in (runners, runners[::-1], (runners[1], runners[1])):
        RunnerState.of(saved).restore(restored)
        for rows, copy in zip(saved.cached_rows(), restored.cached_rows(), strict=True):
            copy[:] = rows
        answers = [np.array(each.decode(9)) for each in (saved, restored)]
        assert relative_error(answers[1], answers[0]) < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["granitehybrid", "qwen35"])
def test_a_call_of_several_groups_of_rows(tiny_model: TinyModelFactory, name: str) -> None:
    """The last layer is recurrent: of most rows it needs the state alone."""
    sizes = replace(SHAPE, max_context=576, batch_size=576, chunk_size=64, all_rows=False)
    options = {**SMALL, "n_layers": 3, "architecture": name, "n_experts": 0}
    path, prompt = tiny_model(**options), random_tokens(517)  # groups are of 512 rows
    logits = []
    for device in (None, open_device(0)):
        with open_model(path, device) as file:
            runner = file.load().start_session(DenseConfig(), sizes)
        first = np.array(runner.prefill(prompt, is_last=True))
        logits.append(np.stack([first, *(np.array(runner.decode(token)) for token in (5, 6))]))
    assert relative_error(logits[1], logits[0]) < LOGIT_TOLERANCE


def test_memory_is_told(path: Path) -> None:
    for on_device in (False, True):
        (runner,) = start(path, 1, on_device=on_device)
        assert runner.memory_bytes["recurrent_state"] > 0
    (on_cpu,) = start(path, 1, on_device=False)
    assert runner.memory_bytes["recurrent_state"] == on_cpu.memory_bytes["recurrent_state"]
