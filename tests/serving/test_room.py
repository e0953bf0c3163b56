"""Memory for conversations: what all write to counts once; what cannot fit sends nobody away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgeh2o import DenseConfig, PrefillConfig
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.engine.session import Session
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.conversation import Conversation
from edgeh2o.serving.prefix_disk import PrefixDisk
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


def test_statistics_wait_for_nobody(serving_model: Path) -> None:
    """The event loop asked for them, and stood still while a conversation was chosen."""
    with (
        open_engine(serving_model, **OPTIONS) as engine,
        ThreadPoolExecutor(1) as threads,
        engine.pool.room.lock,
    ):
        assert threads.submit(lambda: engine.pool.n_bytes).result(20) == 0


@pytest.mark.parametrize("step", ["prepare", "begin_as", "load", "shape_of"])
def test_an_error_that_nobody_expects_leaves_no_conversation_at_work(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Memory was reserved for it to the end of the server, and others waited for it."""
    prompt = tokens_of(1100, seed=0)
    sizes = PrefillConfig(batch_size=256, chunk_size=64)
    options = {**OPTIONS, "prefix_disk": (tmp_path, 2**26), "prefill": sizes}
    with open_engine(serving_model, **options) as engine:
        answer(engine, request_of(prompt))
    with open_engine(serving_model, **options) as engine:
        if step in ("begin_as", "shape_of"):  # else there is a file to load
            answer(engine, request_of(prompt))

        def fail(*_: object, **__: object) -> None:
            raise MemoryError("all of a sudden")

        asked = tokens_of(400, seed=1) if step == "prepare" else prompt[:400]
        monkeypatch.setattr(Conversation if step == "shape_of" else Session, step, fail)
        with pytest.raises(MemoryError, match="all of a sudden"):
            answer(engine, request_of(asked))
        monkeypatch.undo()
        assert not any(each.is_busy for each in engine.pool.room.kept)
        assert answer(engine, request_of(asked)).text


def test_an_error_of_the_disk_that_nobody_expects_is_in_the_log(
    serving_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("never heard of")

    options = OPTIONS | {"prefix_ram_bytes": 0, "prefix_disk": (tmp_path, 2**26)}
    with open_engine(serving_model, **options) as engine, caplog.at_level("ERROR"):
        monkeypatch.setattr(PrefixDisk, "save", fail)
        for seed in range(2):
            answer(engine, request_of(tokens_of(300, seed)))
        engine.pool.wait_for_disk()
        monkeypatch.undo()
    assert "a conversation is not kept on the disk" in caplog.text
    assert "never heard of" in caplog.text


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
