"""When a session reuses its runner, and when it starts another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeh2o.engine.memory_fit import RECHECK_RESERVE_BYTES
from edgeh2o.engine.session import Session
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from tests.engine.fakes import FakeModel, ScriptedRunner, make_plan


def _session(model: Any, **runtime: Any) -> Session:
    prompts: Any = SimpleNamespace(model=model)
    session = Session(
        prompts, make_plan(**runtime), path=Path("tiny.gguf"), seed=None, on_progress=None
    )
    session.take_weights(model, 0.0)
    return session


def test_session_is_reused_when_the_context_suffices() -> None:
    model = FakeModel()
    session = _session(model)
    first = session.prepare(100, 10)
    first.prefill(np.zeros(100, dtype=np.int32), is_last=True)
    assert session.prepare(4000, 96) is first
    assert first.position == 0
    assert [shape.max_context for shape in model.started] == [4096]


def test_session_grows_when_a_prompt_needs_more() -> None:
    model = FakeModel()
    session = _session(model)
    first = session.prepare(100, 10)
    second = session.prepare(5000, 10)
    assert second is not first
    assert session.prepare(100, 10) is second
    assert [shape.max_context for shape in model.started] == [4096, 5120]


def test_a_short_prompt_takes_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take the memory of the whole context at once, and the time to clear it."""
    small: list[int] = []

    def note(runner: ScriptedRunner) -> None:
        small.append(runner.max_context)

    monkeypatch.setattr(ScriptedRunner, "use_small_pages", note, raising=False)
    for n_prompt, context in ((10, 4096), (2047, 4096), (2048, 4096), (5000, 5120), (5000, 16384)):
        _session(FakeModel(), context_size=context, trained=16384).prepare(n_prompt, 10)
    assert small == [4096, 4096, 16384]


def test_session_that_cannot_fit_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: RECHECK_RESERVE_BYTES + 500_000)
    model = FakeModel()
    with pytest.raises(ResourceError, match="the largest context that fits is -c 4352"):
        _session(model, context_size=8192).prepare(10, 10)
    assert model.started == []
