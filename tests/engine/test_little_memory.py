"""Contexts that nobody named where memory is short: what fits is taken, and said."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeh2o import LLM, ContextLengthError, DenseConfig, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.engine.session import Session
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.runners.native import NativeModelFile
from tests.tiny_models import TinyModelFactory

SetRoom = Callable[[int, int], None]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    """With enough cache per position to stand out from what does not grow with the context."""
    return tiny_model(tensor_type="Q4_0", context_length=16384, n_layers=8)


@pytest.fixture
def set_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> SetRoom:
    """Lets memory hold a context of so many positions, and weights, and no more."""
    opened: list[Session] = []
    with LLM(model, attention=DenseConfig(), check=opened.append) as llm:
        loaded = llm._session.model
        plan = llm._session.plan

        def size(context: int) -> int:
            shape = plan.shape(context)
            return sum(loaded.estimate_session_bytes(plan.attention, shape).values())

        sizes = {context: size(context) for context in (1536, 4096, 4608, 6144)}

    def set_room(context: int, weight_bytes: int) -> None:
        room = RESERVE_BYTES + weight_bytes + sizes[context] + 1000
        monkeypatch.setattr(memory, "available_bytes", lambda: room)
        monkeypatch.setattr(memory, "binding_limit", str)

    return set_room


def _tokens(n: int) -> list[int]:
    return [5 + i % 90 for i in range(n)]


def test_a_prompt_is_answered_in_the_context_that_fits(model: Path, set_room: SetRoom) -> None:
    """4,096 positions were asked for, and refused, whatever the prompt."""
    weights = _weights(model)
    set_room(1536, weights)
    with pytest.warns(UserWarning, match="room for a context of 1,536 positions, which prompt"):
        llm = LLM(model, attention=DenseConfig())
    with llm:
        set_room(1536, 0)
        result = llm.generate(_tokens(1400), SamplingParams(max_tokens=20, ignore_eos=True))
        assert (result.stats.context_size, result.stats.generated_tokens) == (1536, 20)
        full = llm.generate(_tokens(1530), SamplingParams(max_tokens=20, ignore_eos=True))
        assert (full.finish_reason, full.stats.generated_tokens) == ("length", 7)
        with pytest.raises(ContextLengthError, match="memory has no room for more: shorten it"):
            llm.generate(_tokens(1537), SamplingParams(max_tokens=2))


def test_the_room_of_an_open_answer_is_what_fits(model: Path, set_room: SetRoom) -> None:
    """The largest context was named for -c, where the prompt and some answer fit."""
    with LLM(model, attention=DenseConfig()) as llm:
        set_room(4608, 0)
        with pytest.warns(UserWarning, match="4,608 positions where the prompt of 4,500 tokens"):
            result = llm.generate(_tokens(4500), SamplingParams(max_tokens=120, ignore_eos=True))
        assert (result.stats.context_size, result.stats.generated_tokens) == (4608, 109)
        with pytest.raises(ResourceError, match="the largest context that fits is -c 4608"):
            llm.generate(_tokens(5000), SamplingParams(max_tokens=2))


def test_a_conversation_stays_where_it_cannot_grow(
    model: Path, set_room: SetRoom, recwarn: pytest.WarningsRecorder
) -> None:
    """A turn was refused for a context that its prompt did not need."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(model, attention=DenseConfig()) as llm:
        llm.generate(_tokens(3000), sampling, keep_cache=True)
        set_room(1536, 0)
        open_answer = SamplingParams(max_tokens=1200, ignore_eos=True)
        stream = llm.stream(_tokens(3500), open_answer, keep_cache=True)
        next(iter(stream))
        stream.close()
        stats = stream.result().stats
        assert (stats.cached_tokens, stats.context_size) == (3000, 4096)
    assert not recwarn.list


def test_the_command_line_says_what_fits(
    model: Path, set_room: SetRoom, capsys: pytest.CaptureFixture[str]
) -> None:
    set_room(1536, _weights(model))
    assert main(["run", str(model), "-p", "in", "-n", "2", "--attention", "dense"]) == 0
    stderr = capsys.readouterr().err
    assert "edgeh2o: warning: memory has room for a context of 1,536 positions" in stderr


def test_a_chat_forgets_what_memory_has_no_room_for(
    model: Path,
    set_room: SetRoom,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ended, as if its context were as long as the model was trained on."""
    lines = (b"the art is " * 120 + b"\n") * 4
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    set_room(1536, _weights(model))
    options = ["-n", "4", "--attention", "dense", "--context-full", "shift"]
    assert main(["chat", str(model), *options]) == 0
    assert "messages are forgotten" in capsys.readouterr().err


def _weights(model: Path) -> int:
    with NativeModelFile(model) as file:
        return file.n_weight_bytes
