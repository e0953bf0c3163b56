"""Requests at the same time: each gets what it gets alone, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from edgeh2o.engine.grammar import Grammar
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.events import Progress
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.scheduler import CancelledError, Scheduler
from edgeh2o.serving.ticket import Ticket
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine


def requests() -> list[GenerationRequest]:
    """Of many lengths and kinds."""
    made = [
        request_of(tokens_of(length, seed=20 + i), 20 + 3 * i)
        for i, length in enumerate((5, 700, 64, 129, 300, 31, 1000, 2))
    ]
    made.append(request_of(tokens_of(40, seed=40), 30, grammar=Grammar("regex", "[a-f]{9}")))
    made.append(request_of(tokens_of(90, seed=41), 30, bias={5: 100.0}, presence_penalty=1.5))
    return made


def alone(model: Path, wanted: Sequence[GenerationRequest]) -> list[Answered]:
    with open_engine(model, prefix_ram_bytes=0) as engine:
        return [answer(engine, request) for request in wanted]


def test_neighbours_change_nothing(serving_model: Path) -> None:
    wanted = requests()
    expected = alone(serving_model, wanted)
    with open_engine(serving_model) as engine, ThreadPoolExecutor(len(wanted)) as threads:
        got = list(threads.map(lambda request: answer(engine, request), wanted))
        scheduler = engine.scheduler
        assert scheduler.n_step_rows > 1.5 * scheduler.n_steps  # they did share their passes
        runners = [each.runner for each in engine.pool.room.kept if each.runner is not None]
        assert len({id(runner.runner.workspace) for runner in runners}) == 1
    for one, other in zip(got, expected, strict=True):
        assert (one.text, one.logprobs) == (other.text, other.logprobs)
        assert one.finish_reason == other.finish_reason


def test_prompts_that_begin_alike_may_be_read_at_once(serving_model: Path) -> None:
    document = tokens_of(900, seed=1)
    wanted = [request_of(document + tokens_of(30, seed=i)) for i in range(2, 8)]
    expected = alone(serving_model, wanted)
    with open_engine(serving_model) as engine, ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda request: answer(engine, request), wanted))
    assert [each.logprobs for each in got] == [each.logprobs for each in expected]
    assert sum(each.stats.cached_tokens > 800 for each in got) >= 3


def test_a_short_request_does_not_wait_for_a_long_prompt(serving_model: Path) -> None:
    with open_engine(serving_model) as engine, ThreadPoolExecutor(1) as threads:
        is_reading, seen = Event(), []

        def emit(event: object) -> None:
            if isinstance(event, Progress) and event.done:
                is_reading.set()
            seen.append(event)

        long = threads.submit(engine.answer, request_of(tokens_of(6000, seed=3)), emit, Ticket())
        assert is_reading.wait(30)
        answer(engine, request_of([5, 6, 7], 3))
        progress = [event.done for event in seen if isinstance(event, Progress)]
        assert progress[-1] < 6000  # it was not over yet
        long.result(60)


def test_a_failure_of_one_is_nobody_elses(serving_model: Path) -> None:
    wanted = requests()[:3]
    expected = alone(serving_model, wanted)
    with open_engine(serving_model) as engine, ThreadPoolExecutor(4) as threads:
        ticket = Ticket()
        ticket.cancel("nobody waits")
        failing = threads.submit(
            engine.answer, request_of(tokens_of(900, seed=4)), lambda _: None, ticket
        )
        got = list(threads.map(lambda request: answer(engine, request), wanted))
        with pytest.raises(CancelledError, match="nobody waits"):
            failing.result(30)
    assert [each.logprobs for each in got] == [each.logprobs for each in expected]


def test_closing_ends_what_is_in_progress(serving_model: Path) -> None:
    with open_engine(serving_model) as engine, ThreadPoolExecutor(1) as threads:
        is_reading = Event()
        request = request_of(tokens_of(6000, seed=3), 500)
        running = threads.submit(
            AnswerEngine.answer, engine, request, lambda _: is_reading.set(), Ticket()
        )
        assert is_reading.wait(30)
        engine.scheduler.close()
        with pytest.raises(CancelledError, match="shutting down"):
            running.result(30)


def test_calls_that_fail_raise_where_they_were_made() -> None:
    scheduler = Scheduler()
    with pytest.raises(ZeroDivisionError):
        scheduler.call(lambda: 1 // 0)
    assert scheduler.call(lambda: 5) == 5
    scheduler.close()
    with pytest.raises(CancelledError):
        scheduler.call(lambda: 5)
