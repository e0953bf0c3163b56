"""Memory for conversations: what all write to counts once; what cannot fit sends nobody away."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeh2o import DenseConfig, PrefillConfig
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.serving.answers import AnswerEngine
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine

CONTEXT = 4096
# All rows of a call are written by a prompt of a chunk.
OPTIONS = {
    "attention": DenseConfig(),
    "prefill": PrefillConfig(batch_size=1024, chunk_size=1024),
    "prefix_ram_bytes": 2**30,
}


def _own_and_shared(engine: AnswerEngine) -> tuple[int, int]:
    """What a session takes for itself, and what all write to."""
    model, plan = engine.pool.model.model, engine.pool.plan
    parts = model.estimate_session_bytes(plan.attention, plan.shape(CONTEXT))
    shared = parts["activations"] + parts["scratch"]
    return sum(parts.values()) - shared, shared


def test_what_all_write_to_counts_once(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conversation was refused for memory that the one before had taken already."""
    with open_engine(serving_model, **OPTIONS) as engine:
        own, shared = _own_and_shared(engine)
        answer(engine, request_of(tokens_of(1100, seed=0)))
        left = RESERVE_BYTES + own + shared // 2
        monkeypatch.setattr(memory, "available_bytes", lambda: left)
        answer(engine, request_of(tokens_of(1100, seed=1)))
        assert len(engine.pool) == 2


def test_what_nobody_has_written_yet_counts(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(serving_model, **OPTIONS) as engine:
        own, shared = _own_and_shared(engine)
        answer(engine, request_of(tokens_of(8, seed=0)))
        left = RESERVE_BYTES + own + shared - shared // 2
        monkeypatch.setattr(memory, "available_bytes", lambda: left)
        with pytest.raises(ResourceError, match="activations"):
            answer(engine, request_of(tokens_of(1100, seed=1)))


def test_what_all_write_to_is_not_freed_with_each(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as often as there were conversations, which all went for nothing."""
    with open_engine(serving_model, **OPTIONS) as engine:
        prompts = [tokens_of(1100, seed) for seed in range(4)]
        for prompt in prompts:
            answer(engine, request_of(prompt))
        own, shared = _own_and_shared(engine)
        left = RESERVE_BYTES + own - engine.pool.n_bytes - shared // 2
        monkeypatch.setattr(memory, "available_bytes", lambda: left)
        with pytest.raises(ResourceError, match="available"):
            answer(engine, request_of(tokens_of(1100, seed=9)))
        assert len(engine.pool) == 4
