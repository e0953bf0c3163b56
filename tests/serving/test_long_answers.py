"""Memory for answers whose limit is far: as for an open one, and more when they get there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from edgeh2o import DenseConfig
from edgeh2o.engine.context_size import MIN_DEFAULT_CONTEXT, OPEN_ANSWER_TOKENS
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.host import memory
from edgeh2o.serving import conversation, room
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.api_error import PromptTooLongError
from edgeh2o.serving.events import Event, Finished, Piece
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.ticket import Ticket
from tests.serving.answering import ATTENTIONS, answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory

CONTEXT = 8192
LONG = 8000
PROMPT = 3000
TRAINED = 5120  # beyond the least context: an open answer to the prompt grows twice
OPTIONS: dict[str, Any] = {"attention": DenseConfig(), "prefix_ram_bytes": 2**30}
STEP = 16
PLENTY = 2**30


@pytest.fixture(scope="module")
def soon_full(tiny_model: TinyModelFactory) -> Path:
    """The model of the others, with less room."""
    return tiny_model(tensor_type="Q4_0", context_length=TRAINED, n_layers=2)


@pytest.fixture
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have memory for 16 tokens, and ask for that of 16 more."""
    for module in (conversation, room):
        monkeypatch.setattr(module, "OPEN_ANSWER_TOKENS", STEP)


class _Memory:
    """What is available once an answer has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = False
        self.is_enough = lambda: False
        monkeypatch.setattr(memory, "available_bytes", self._available)

    def _available(self) -> int:
        return RESERVE_BYTES + (PLENTY if not self.has_begun or self.is_enough() else 0)

    def answer(
        self, engine: AnswerEngine, request: GenerationRequest, begin: Callable[[], Any] = bool
    ) -> list[Event]:
        """The events of an answer; ``begin`` is called at its first piece."""
        events: list[Event] = []

        def emit(event: Event) -> None:
            if isinstance(event, Piece) and not any(isinstance(e, Piece) for e in events):
                begin()
                self.has_begun = True
            events.append(event)

        engine.answer(request, emit, Ticket())
        return events


def test_a_far_limit_takes_what_an_open_answer_takes(serving_model: Path) -> None:
    """Memory was kept for all that an answer might have, and conversations went for it."""
    with open_engine(serving_model, context_size=CONTEXT, **OPTIONS) as engine:
        estimate = engine.pool.room.estimate
        assert estimate(100, LONG) == estimate(100, -1) == estimate(100, OPEN_ANSWER_TOKENS)
        assert sum(estimate(100, 10)) < sum(estimate(100, -1))


@pytest.mark.parametrize("n_alike", [0, 500])
def test_a_far_limit_is_not_refused_for_want_of_memory(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch, n_alike: int
) -> None:
    """The whole context of such an answer had to fit, or others went and it was refused."""
    with open_engine(serving_model, **OPTIONS) as engine:
        prompts = [tokens_of(1300, seed) for seed in range(3)]
        for prompt in prompts:
            answer(engine, request_of(prompt))
        plan, model = engine.pool.plan, engine.pool.model
        shape = plan.shape(MIN_DEFAULT_CONTEXT * 3 // 2)
        fits = sum(model.estimate_session_bytes(plan.attention, shape).values())
        monkeypatch.setattr(memory, "available_bytes", lambda: RESERVE_BYTES + fits)
        prompt = prompts[0][:n_alike] + tokens_of(1300 - n_alike, seed=9)
        got = answer(engine, request_of(prompt, LONG))
        assert got.finish_reason == "length"
        assert 1300 + got.stats.generated_tokens == CONTEXT + 1  # there was memory for it then
        assert (got.stats.cached_tokens > 0) == (n_alike > 0)
        assert len(engine.pool) == 4


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_open_answer_goes_on_to_what_the_model_was_trained_on(
    soon_full: Path, attention: str
) -> None:
    """It ended at 4,096 tokens, or 1,024 behind the prompt, by "length": an error to agents."""
    options = {**OPTIONS, "attention": ATTENTIONS[attention]}
    with open_engine(soon_full, context_size=MIN_DEFAULT_CONTEXT, **options) as engine:
        ended = answer(engine, request_of(tokens_of(PROMPT, seed=1), -1))
    assert PROMPT + ended.stats.generated_tokens == MIN_DEFAULT_CONTEXT + 1
    with open_engine(soon_full, **options) as engine:
        went_on = answer(engine, request_of(tokens_of(PROMPT, seed=1), -1))
        assert engine.pool.context_limit == TRAINED
    assert went_on.stats.context_size == TRAINED
    assert PROMPT + went_on.stats.generated_tokens == TRAINED + 1
    # By the same budgets until then.
    n_alike = ended.stats.generated_tokens
    assert went_on.logprobs[:n_alike] == ended.logprobs


def test_room_for_an_open_answer_takes_no_memory(serving_model: Path) -> None:
    with open_engine(serving_model, **OPTIONS) as engine:
        answer(engine, request_of(tokens_of(100, seed=1), 1))
        plan, model = engine.pool.plan, engine.pool.model
        (kept,) = engine.pool.room.kept
        assert kept.runner is not None and kept.runner.max_context == CONTEXT
        parts = model.estimate_session_bytes(plan.attention, plan.shape(OPEN_ANSWER_TOKENS))
        assert engine.pool.n_bytes < parts["kv_cache"]


def test_no_room_is_made_where_it_counts_at_once(
    soon_full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "counts_when_allocated", lambda: True)
    with open_engine(soon_full, **OPTIONS) as engine:
        got = answer(engine, request_of(tokens_of(PROMPT, seed=1), -1))
    assert PROMPT + got.stats.generated_tokens == MIN_DEFAULT_CONTEXT + 1


def test_the_context_is_what_memory_holds(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the model was trained on was promised."""
    with open_engine(serving_model, **OPTIONS) as engine:
        plan, model = engine.pool.plan, engine.pool.model
        parts = model.estimate_session_bytes(plan.attention, plan.shape(CONTEXT - 512))
    fits = sum(parts.values())
    monkeypatch.setattr(memory, "available_bytes", lambda: RESERVE_BYTES + fits)
    with open_engine(serving_model, **OPTIONS) as engine:
        assert engine.pool.context_limit == CONTEXT - 512
        got = answer(engine, request_of(tokens_of(100, seed=1), -1))
        assert 100 + got.stats.generated_tokens == CONTEXT - 512 + 1
        with pytest.raises(PromptTooLongError, match=f"maximum context length is {CONTEXT - 512}"):
            answer(engine, request_of(tokens_of(CONTEXT - 500, seed=1), 1))


@pytest.mark.usefixtures("_short_steps")
def test_those_at_rest_go_for_an_answer_that_grows(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(serving_model, context_size=CONTEXT, **OPTIONS) as engine:
        answer(engine, request_of(tokens_of(600, seed=0)))
        left = _Memory(monkeypatch)
        left.is_enough = lambda: len(engine.pool) == 1
        *_, last = left.answer(engine, request_of(tokens_of(100, seed=1), 4 * STEP))
        assert isinstance(last, Finished) and last.stats.generated_tokens == 4 * STEP
        assert len(engine.pool) == 1


@pytest.mark.usefixtures("_short_steps")
def test_an_answer_ends_where_memory_does(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open answer went on until the process was ended for it."""
    with open_engine(serving_model, context_size=CONTEXT, **OPTIONS) as engine:
        events = _Memory(monkeypatch).answer(engine, request_of(tokens_of(100, seed=1), -1))
        last = events[-1]
        assert isinstance(last, Finished) and last.finish_reason == "length"
        assert STEP <= last.stats.generated_tokens <= STEP + 2
        assert sum(isinstance(e, Piece) for e in events) == last.stats.generated_tokens


@pytest.mark.usefixtures("_short_steps")
def test_answers_that_grow_do_not_wait_for_each_other(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends, and the other goes on with its memory."""
    with open_engine(serving_model, context_size=CONTEXT, **OPTIONS) as engine:
        left, both = _Memory(monkeypatch), Barrier(2, timeout=60)
        left.is_enough = lambda: sum(each.is_busy for each in engine.pool.room.kept) == 1

        def ask(request: GenerationRequest) -> int:
            *_, last = left.answer(engine, request, begin=both.wait)
            assert isinstance(last, Finished) and last.finish_reason == "length"
            return last.stats.generated_tokens

        requests = [request_of(tokens_of(100, seed), 4 * STEP) for seed in range(2)]
        with ThreadPoolExecutor(2) as threads:
            short, whole = sorted(threads.map(ask, requests))
        assert STEP <= short <= STEP + 2 and whole == 4 * STEP
