"""Answers that are written together guess tokens ahead, each its own; nothing of them changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.request import Request, urlopen

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.events import Event
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.scheduler import CancelledError
from edgeh2o.serving.ticket import Ticket
from tests.engine.drafted import PENALISED, SAMPLINGS
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory

CONTEXT = 1024
KINDS: dict[str, dict[str, object]] = {
    "llama": {"n_layers": 2},
    "lfm2": {"n_layers": 4},
    "qwen35": {"n_layers": 4},
    "qwen4exp": {"n_layers": 4},
    "bailingmoe3": {"n_layers": 4},
    "kimi-linear": {"n_layers": 4, "q_rank": 0},
    "granitehybrid": {"n_layers": 4},
    "falcon-h1": {"n_layers": 2},
    "plamo2": {"n_layers": 4},
    "rwkv6": {"n_layers": 2},
    "rwkv6qwen2": {"n_layers": 2},
    "rwkv7": {"n_layers": 2},
    "arwkv7": {"n_layers": 2, "wkv_gate_rank": 0},
    "deepseek2": {"n_layers": 3, "n_experts": 4, "n_experts_used": 2},
    "glm-dsa": {"n_layers": 3, "indexer_period": 2, "n_experts": 0},
}


def edit(seed: int, lookup: str = "7", n_tokens: int = 50, **sampling: Any) -> GenerationRequest:
    """Its prompt repeats itself, and a greedy answer of random weights runs in circles."""
    part = tokens_of(60, seed=seed)
    made = request_of([*part, *part[:40], *part[20:], *part])
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": seed, "temperature": 0.0}
    return replace(made, sampling=SamplingParams(**{**options, "lookup": lookup, **sampling}))


def chat(seed: int, n_tokens: int = 50) -> GenerationRequest:
    """Nothing to look up."""
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": seed, "temperature": 1.5}
    made = request_of(tokens_of(30, seed=seed))
    return replace(made, sampling=SamplingParams(**options))  # type: ignore[arg-type]


def without(request: GenerationRequest) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, lookup="off"))


def alone(model: Path, wanted: list[GenerationRequest], **options: Any) -> list[Answered]:
    """One by one, without guesses, each from nothing."""
    with open_engine(model, prefix_ram_bytes=0, **options) as engine:
        return [answer(engine, without(request)) for request in wanted]


def together(engine: AnswerEngine, wanted: list[GenerationRequest]) -> list[Answered]:
    with ThreadPoolExecutor(len(wanted)) as threads:
        return list(threads.map(lambda request: answer(engine, request), wanted))


def compare(got: list[Answered], expected: list[Answered]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.text, one.logprobs) == (other.text, other.logprobs)
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_kind(kind: str, tiny_model: TinyModelFactory) -> None:
    model = tiny_model(architecture=kind, context_length=CONTEXT, **KINDS[kind])
    few = {token: 60.0 for token in (11, 40, 77)}  # of which the answers are: they repeat them
    wanted = [edit(1, logit_bias=few), edit(2, "15", logit_bias=few), chat(3), edit(4, "2")]
    expected = alone(model, wanted)
    with open_engine(model) as engine:
        for _ in range(2):  # the second time from what is kept
            got = together(engine, wanted)
            compare(got, expected)
            for each in got[:2]:
                assert each.stats.drafted_tokens >= each.stats.accepted_tokens > 5
                assert each.stats.decode_calls + each.stats.accepted_tokens == 49
        assert engine.scheduler.n_step_rows > 1.2 * engine.scheduler.n_steps


@pytest.mark.parametrize("rule", [*SAMPLINGS, *PENALISED])
def test_sampling_of_every_kind(serving_model: Path, rule: dict[str, Any]) -> None:
    wanted = [edit(seed, **rule) for seed in range(3)] + [chat(5)]
    expected = alone(serving_model, wanted)
    with open_engine(serving_model) as engine:
        compare(together(engine, wanted), expected)


@pytest.mark.parametrize("way", ["evict", "shift"])
def test_a_neighbour_that_goes_past_its_context(serving_model: Path, way: str) -> None:
    past = request_of(tokens_of(200, seed=8))
    options = {"max_tokens": 120, "ignore_eos": True, "seed": 3, "temperature": 0.0}
    past = replace(past, sampling=SamplingParams(**options, context_full=way))  # type: ignore[arg-type]
    wanted = [past, edit(1), edit(2, "15", n_tokens=30)]
    if way == "shift":
        wanted[0] = replace(past, sampling=replace(past.sampling, lookup="9"))
    # Prompts of 220 tokens and answers of 30: those fit.
    wanted[1] = edit(1, n_tokens=30)
    expected = alone(serving_model, wanted, context_size=256)
    with open_engine(serving_model, context_size=256) as engine:
        got = together(engine, wanted)
    compare(got, expected)
    stats = got[0].stats
    assert stats.evicted_tokens > 0 if way == "evict" else stats.context_shifts > 0


def test_who_is_cancelled_takes_nothing_along(serving_model: Path) -> None:
    """In the middle of an answer, with guesses that were looked at and not reached."""
    wanted = [edit(seed) for seed in range(3)]
    expected = alone(serving_model, wanted)
    with open_engine(serving_model) as engine, ThreadPoolExecutor(4) as threads:
        ticket, n_events = Ticket(), 0

        def send(event: Event) -> None:
            nonlocal n_events
            n_events += 1
            if n_events == 12:
                ticket.cancel("gone")

        start = Barrier(4)

        def wait(run: Callable[[], Any]) -> Any:
            start.wait(30)
            return run()

        gone = threads.submit(wait, lambda: engine.answer(edit(9, "15", 400), send, ticket))
        others = [
            threads.submit(wait, lambda each=each: answer(engine, each))  # type: ignore[misc]
            for each in wanted
        ]
        compare([each.result() for each in others], expected)
        with pytest.raises(CancelledError, match="gone"):
            gone.result()
        again = edit(9, "15")
        compare([answer(engine, again)], alone(serving_model, [again]))


def test_a_server_says_how_many_were_right(start_server: Callable[..., Any]) -> None:
    """Of two streams at once, whose texts are those of one server without guesses."""
    words = "the hen is in the pen and the pen is on the table " * 30
    bodies = [
        {"prompt": f"{words}{i}", "n_predict": 60, "temperature": 0, "ignore_eos": True}
        for i in range(2)
    ]

    def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(f"{url}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=120) as response:
            answered: dict[str, Any] = json.load(response)
            return answered

    sizes = ["--parallel", "2", "-ub", "64", "-b", "256"]
    plain = start_server(*sizes, "--lookup", "off")
    expected = [ask(plain.url, body)["content"] for body in bodies]
    guessing = start_server(*sizes, "--lookup", "8")
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(lambda body: ask(guessing.url, body), bodies))
    assert [each["content"] for each in got] == expected
    assert all(each["timings"]["draft_n_accepted"] > 10 for each in got)
