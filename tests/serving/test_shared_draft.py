"""A draft model of a server: it drafts for the answer that is alone, and changes no text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from edgeh2o import PrefillConfig, SamplingParams
from edgeh2o.engine import draft_model
from edgeh2o.errors import ResourceError
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.scheduler import Scheduler
from edgeh2o.serving.shared_draft import SharedDraft
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine

EXACT: dict[str, Any] = {
    "attention": "dense",
    "attention_precision": "f32",
    "prefill": PrefillConfig(batch_size=64, chunk_size=16),
}


def asking(seed: int, n_tokens: int = 40, **sampling: Any) -> GenerationRequest:
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": seed, "lookup": "off"}
    made = request_of(tokens_of(150, seed=seed))
    return replace(made, sampling=SamplingParams(**{**options, "draft_tokens": "4", **sampling}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_alone_is_that_without(serving_model: Path, temperature: float) -> None:
    """One after another, of several conversations, some of which go on."""
    with open_engine(serving_model, draft=serving_model, **EXACT) as engine:
        n_accepted = 0
        for seed in (1, 2, 1, 3, 2):
            plain = answer(engine, asking(seed, temperature=temperature, draft_tokens="off"))
            found = answer(engine, asking(seed, temperature=temperature))
            assert (found.text, found.logprobs) == (plain.text, plain.logprobs)
            stats = found.stats
            assert stats.decode_calls + stats.accepted_tokens == 39
            assert stats.model_drafted_tokens == stats.drafted_tokens
            assert Path(stats.draft_model) == serving_model
            assert stats.memory_bytes["draft_weights"] > 0 < stats.memory_bytes["draft_session"]
            n_accepted += stats.accepted_tokens
        assert n_accepted > 5 * 25  # it drafts for itself


def test_neighbours_and_drafts_change_nothing(serving_model: Path) -> None:
    wanted = [asking(seed) for seed in range(6)]
    with open_engine(serving_model, **EXACT) as engine:
        alone = [answer(engine, each) for each in wanted]
    with (
        open_engine(serving_model, draft=serving_model, **EXACT) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        for _ in range(2):
            together = list(threads.map(lambda request: answer(engine, request), wanted))
            assert [each.logprobs for each in together] == [each.logprobs for each in alone]
        assert answer(engine, wanted[0]).stats.accepted_tokens > 25  # alone again


class Draft:
    """A ``DraftProvider`` and its source and runner, which writes down what is called."""

    vocab_size, path, max_context = 8, Path("draft"), 64

    def __init__(self) -> None:
        self.memory_bytes: dict[str, int] = {}
        self.calls: list[int] = []
        self.fails = False
        self.runner = SimpleNamespace(decode=self.calls.append, position=3)

    def prepared(self, sampling: SamplingParams, context: int) -> Draft | None:
        if self.fails:
            raise ResourceError("no room")
        return self if sampling.draft_tokens != "off" else None

    @contextmanager
    def lend(self) -> Iterator[Any]:
        yield self.runner


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


def test_whoever_is_alone_has_it(scheduler: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    draft = Draft()
    shared = SharedDraft(draft, scheduler)
    assert shared.prepared(SamplingParams(draft_tokens="off"), 64) is None
    first, second = (shared.prepared(SamplingParams(), 64) for _ in range(2))
    assert first is not None and second is not None
    with first.lend() as mine:
        assert mine is not None and mine.position == 3
        mine.decode(5)
        with second.lend() as other:
            assert other is None
        assert shared.prepared(SamplingParams(), 64) is None
    with first.lend() as again:
        assert again is mine  # nobody has written to it since
    with second.lend() as other:
        assert other is not None and other is not mine
        other.decode(6)
    with first.lend() as again:
        assert again is not None and again is not mine
    assert draft.calls == [5, 6]
    with scheduler.reading(), first.lend() as again:
        assert again is None
    draft.fails = True
    assert shared.prepared(SamplingParams(), 64) is None
    assert "written without the draft model: no room" in caplog.text


def test_a_longer_text_without_room_ends_no_answer(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had drafted failed by the next token."""

    def fail(*_: object) -> None:
        raise ResourceError("no room")

    with open_engine(serving_model, draft=serving_model, **EXACT) as engine:
        shared = engine.pool.draft
        assert isinstance(shared, SharedDraft)
        first = shared.prepared(SamplingParams(), 256)
        assert first is not None
        with first.lend() as mine:
            assert mine is not None
        with monkeypatch.context() as patch:
            patch.setattr(draft_model, "start_runner", fail)
            assert shared.prepared(SamplingParams(), 8000) is None
            for _ in range(2):
                with first.lend() as mine:
                    assert mine is None
        second = shared.prepared(SamplingParams(), 64)
        assert second is not None
        with second.lend() as mine:
            assert mine is not None
        with first.lend() as mine:  # which reads its text again
            assert mine is not None and mine.position == 0
        assert first.max_context == 64


def test_its_calls_go_before_others(scheduler: Scheduler) -> None:
    """Which wait anyhow: for the rest of a prompt, say."""
    entered, may_end, order = Event(), Event(), []

    def block() -> None:
        entered.set()
        assert may_end.wait(10)

    def call(name: str, n_waiting: int, *, is_next: bool) -> Thread:
        thread = Thread(target=lambda: scheduler.call(lambda: order.append(name), is_next=is_next))
        thread.start()
        while len(scheduler._calls) < n_waiting:
            sleep(0.001)
        return thread

    threads = [Thread(target=lambda: scheduler.call(block))]
    threads[0].start()
    assert entered.wait(10)
    threads += [
        call("prompt", 1, is_next=False),
        call("other prompt", 2, is_next=False),
        call("draft", 3, is_next=True),
    ]
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert order == ["draft", "prompt", "other prompt"]
