"""Memory for conversations: what all write to counts once; what cannot fit sends nobody away."""

from __future__ import annotations

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgeh2o import DenseConfig, PrefillConfig
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.engine.session import Session
from edgeh2o.engine.session_file import SavedSession
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.conversation import Conversation
from edgeh2o.serving.prefix_disk import PrefixDisk
from edgeh2o.serving.shared_runner import SharedRunner
from edgeh2o.serving.ticket import Ticket
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


@pytest.mark.parametrize("step", ["copy_from", "restore"])
def test_what_failed_holds_no_memory_while_another_way_is_tried(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its rows stayed until the request was done, beside those of the conversation that it got."""
    prompt = tokens_of(1100, seed=0)
    sizes = PrefillConfig(batch_size=256, chunk_size=64)
    options = {**OPTIONS, "prefix_disk": (tmp_path, 2**26), "prefill": sizes}
    failed: list[weakref.ref[SharedRunner]] = []
    left: list[bool] = []

    def fail(self: object, other: SharedRunner, *_: object) -> None:
        runner = self if isinstance(self, SharedRunner) else other
        failed.append(weakref.ref(runner))
        raise ResourceError("all of a sudden")

    prepare = Session.prepare

    def look(session: Session, *arguments: int, **options: bool) -> object:
        left.extend(each() is not None for each in failed)
        return prepare(session, *arguments, **options)

    with open_engine(serving_model, **options) as engine:
        answer(engine, request_of(prompt))
    with open_engine(serving_model, **options) as engine:
        if step == "copy_from":
            answer(engine, request_of(prompt))
        for each in engine.pool.room.kept:
            each.slot = 7  # of which another gets a copy
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                owner = SharedRunner if step == "copy_from" else SavedSession
                patch.setattr(owner, step, fail)
                patch.setattr(Session, "prepare", look)
                # pytest keeps what is logged, and with it the error and its frames.
                patch.setattr(logging.getLogger("edgeh2o.serving.prefix_disk"), "disabled", True)
                engine.answer(request_of(prompt[:700]), lambda _: None, Ticket())
        finally:
            gc.enable()
        assert len(failed) == 1 and left == [False]
        assert not any(each.is_busy for each in engine.pool.room.kept)


def test_nobody_waits_while_a_prompt_is_tokenised(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was under the lock by which all conversations are given out and come back."""
    with (
        open_engine(serving_model, **OPTIONS) as engine,
        ThreadPoolExecutor(1) as threads,
    ):
        lock, encode = engine.pool.room.lock, engine.tokenizer.encode
        begun: list[str] = []

        def take() -> bool:
            with ExitStack() as stack:
                return lock.acquire(blocking=False) and stack.callback(lock.release) is not None

        def watch(text: str, **options: object) -> object:
            begun.append(text)
            assert threads.submit(take).result(20), "a prompt is tokenised under the lock"
            return encode(text, **options)

        monkeypatch.setattr(engine.tokenizer, "encode", watch)
        text = "the hen is in the pen "
        said = answer(engine, request_of(text * 20)).text
        for rest in (" and", " and then", " and then a fox"):  # each goes on from all before
            answer(engine, request_of(text * 20 + said + rest))
        assert {text * 20, " and", " a fox"} <= set(begun)


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
