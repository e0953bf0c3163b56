"""One model used by several threads: calls queue up, an open stream keeps other threads out."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from edgeh2o.engine.access import GenerationStream
from edgeh2o.errors import BusyError, UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "the art of the thing is that"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, threads=2) as llm:
        yield llm


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """One thread besides this one."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _generate(llm: LLM) -> tuple[int, ...]:
    return llm.generate(PROMPT, GREEDY).token_ids


def test_calls_of_four_threads_queue_up(llm: LLM) -> None:
    prompts = [f"{PROMPT} {word}" for word in ("in", "for", "all", "it")]
    expected = {prompt: llm.generate(prompt, GREEDY).text for prompt in prompts}

    def ask(prompt: str) -> list[str]:
        return [llm.generate(prompt, GREEDY).text for _ in range(8)]

    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(prompts, pool.map(ask, prompts), strict=True))
    assert answers == {prompt: [text] * 8 for prompt, text in expected.items()}


def test_coroutines_may_use_one_model(llm: LLM) -> None:
    async def ask() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(asyncio.to_thread(_generate, llm) for _ in range(2)))

    assert asyncio.run(ask()) == [_generate(llm)] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(PROMPT, GREEDY),
        lambda llm: llm.stream(PROMPT, GREEDY),
        lambda llm: llm.chat(MESSAGES, GREEDY),
        lambda llm: llm.stream_chat(MESSAGES, GREEDY),
        lambda llm: llm.save_session("s"),
        lambda llm: llm.load_session("s"),
    ],
)
def test_a_stream_of_another_thread_keeps_calls_out(
    llm: LLM, other: ThreadPoolExecutor, call: Callable[[LLM], object]
) -> None:
    alone = llm.generate(PROMPT, GREEDY)
    stream = other.submit(llm.stream, PROMPT, GREEDY).result()
    other.submit(next, stream).result()
    with pytest.raises(BusyError, match="another thread reads a stream"):
        call(llm)
    assert other.submit(stream.finish).result().text == alone.text
    assert _generate(llm) == alone.token_ids


def test_a_call_is_refused_while_a_step_runs(model: Path, other: ThreadPoolExecutor) -> None:
    is_reading, is_refused = Event(), Event()

    def wait(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            is_reading.set()
            assert is_refused.wait(60)

    with LLM(model, on_progress=wait) as llm:
        step = other.submit(lambda: llm.stream(PROMPT, GREEDY).finish())
        assert is_reading.wait(60)
        with pytest.raises(BusyError):
            llm.generate(PROMPT, GREEDY)
        is_refused.set()
        assert step.result().finish_reason == "length"


def test_a_stream_goes_on_in_the_thread_that_reads_it(llm: LLM, other: ThreadPoolExecutor) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    other.submit(next, stream).result()
    with pytest.raises(BusyError):
        llm.generate(PROMPT, GREEDY)
    other.submit(_generate, llm).result()
    with pytest.raises(UsageError, match="ended by a newer prompt"):
        next(stream)


def _close(streams: list[GenerationStream]) -> None:
    streams[0].close()
    assert list(streams[0]) == []


def _break_off(streams: list[GenerationStream]) -> None:
    streams.clear()
    gc.collect()


@pytest.mark.parametrize("end", [_close, _break_off])
def test_a_stream_that_is_given_up_frees_the_model(
    llm: LLM, other: ThreadPoolExecutor, end: Callable[[list[GenerationStream]], None]
) -> None:
    def begin() -> list[GenerationStream]:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        return [stream]

    streams = other.submit(begin).result()
    with pytest.raises(BusyError):
        _generate(llm)
    end(streams)
    assert len(_generate(llm)) == GREEDY.max_tokens


def test_the_stream_of_a_thread_that_ended_frees_the_model(llm: LLM) -> None:
    streams: list[GenerationStream] = []
    thread = Thread(target=lambda: streams.append(llm.stream(PROMPT, GREEDY)))
    thread.start()
    thread.join()
    assert len(_generate(llm)) == GREEDY.max_tokens
    with pytest.raises(UsageError, match="ended by a newer prompt"):
        next(streams[0])


def test_a_closed_stream_keeps_what_it_gave(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    stream.close()
    assert stream.result().token_ids == (first.token_id,)


def test_progress_reports_cannot_use_the_model(model: Path) -> None:
    errors: list[BusyError] = []

    def call(stage: str, *_: Any) -> None:
        if stage == "prefill":
            with pytest.raises(BusyError, match="on_progress must not call it") as caught:
                llm.generate(PROMPT, GREEDY)
            errors.append(caught.value)

    with LLM(model, on_progress=call) as llm:
        llm.generate(PROMPT, GREEDY)
    assert errors


def test_models_with_other_numbers_of_threads_work_at_a_time(model: Path) -> None:
    answers = []

    def ask_another(stage: str, *_: Any) -> None:
        if stage == "prefill":
            answers.append(_generate(second))

    with LLM(model, threads=2) as second, LLM(model, threads=1, on_progress=ask_another) as first:
        answers.append(_generate(first))
        assert set(answers) == {_generate(second)}


def test_models_with_other_numbers_of_threads_work_at_once(
    model: Path, other: ThreadPoolExecutor
) -> None:
    with LLM(model, threads=2) as first, LLM(model, threads=1) as second:
        expected = _generate(first)
        later = other.submit(lambda: [_generate(second) for _ in range(20)])
        assert [_generate(first) for _ in range(20)] == later.result() == [expected] * 20
