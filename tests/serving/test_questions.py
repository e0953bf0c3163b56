"""Another question on the same document reads the question alone, and answers as a whole read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import SamplingParams
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.questions import count_question
from edgeh2o.serving.requests import GenerationRequest
from tests.serving.answering import ATTENTIONS, Answered, answer, request_of
from tests.serving.conftest import open_engine

DOCUMENT = "".join(
    f"{n}. the hen {'is in' if n % 3 else 'was near'} the pen {n * 7}\n" for n in range(70)
)
QUESTIONS = ("what is 7?", "how does it end, then?", "who was\nnear the pen?")


def chat(text: str, *before: str) -> GenerationRequest:
    messages = [{"role": "user", "content": content} for content in (*before, text)]
    sampling = SamplingParams(max_tokens=3, seed=7, ignore_eos=True)
    return GenerationRequest(
        kind="chat", messages=tuple(messages), sampling=sampling, top_logprobs=0
    )


@pytest.fixture(scope="module", params=ATTENTIONS)
def engines(
    request: pytest.FixtureRequest, serving_model: Path
) -> Iterator[tuple[AnswerEngine, AnswerEngine]]:
    """One that keeps what it reads, and one that keeps nothing."""
    attention: Any = ATTENTIONS[request.param]
    with (
        open_engine(serving_model, attention=attention) as keeping,
        open_engine(serving_model, attention=attention, prefix_ram_bytes=0) as forgetting,
    ):
        yield keeping, forgetting


def ask_both(engines: tuple[AnswerEngine, AnswerEngine], wanted: GenerationRequest) -> Answered:
    keeping, forgetting = engines
    got, alone = answer(keeping, wanted), answer(forgetting, wanted)
    assert alone.stats.cached_tokens == 0
    assert (got.text, got.logprobs) == (alone.text, alone.logprobs)
    return got


@pytest.mark.parametrize("kind", ["one message", "two messages", "raw text"])
def test_another_question_is_all_that_is_read(
    engines: tuple[AnswerEngine, AnswerEngine], kind: str
) -> None:
    for number, question in enumerate(QUESTIONS):
        if kind == "one message":
            wanted = chat(f"{DOCUMENT}\n\n{question}")
        elif kind == "two messages":
            wanted = chat(question, DOCUMENT)
        else:
            wanted = request_of(f"{DOCUMENT}{kind}\n\n{question}", 3)
        n_question = count_question(engines[0].open_prompt(wanted), wanted.messages)
        assert 0 < n_question < 60
        got = ask_both(engines, wanted)
        if number:
            n_left = got.stats.prompt_tokens - got.stats.cached_tokens
            n_chunk = (got.stats.prompt_tokens - n_question) % 64
            # A question that begins a quarter of a chunk behind one, or less, is read with that.
            assert n_left == n_question + (n_chunk if n_chunk < 16 else 0)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_questions_and_edits_anywhere_get_the_answers_of_whole_reads(
    engines: tuple[AnswerEngine, AnswerEngine], data: st.DataObject
) -> None:
    text = DOCUMENT[: data.draw(st.integers(400, len(DOCUMENT)), label="length")]
    for turn in range(3):
        question = data.draw(st.sampled_from(QUESTIONS), label="question")
        break_of = data.draw(st.sampled_from(["\n\n", "\n", " "]), label="break")
        ask_both(engines, chat(f"{text}{break_of}{question}"))
        begin = data.draw(st.integers(0, len(text) - 1), label="begin")
        end = begin + data.draw(st.integers(0, 60), label="removed")
        added = data.draw(st.sampled_from([" edit ", "\n\nedit\n\n", "\n"]), label="added")
        text = f"{text[:begin]}{added}{turn}{text[end:]}"


def test_what_has_no_question(serving_model: Path) -> None:
    with open_engine(serving_model) as engine:

        def count(text: str, **fields: Any) -> int:
            wanted = request_of(text, **fields)
            return count_question(engine.open_prompt(wanted), wanted.messages)

        assert count("one line of text") == 0
        assert count("a line\nand another") > 0
        assert count("a\n\n" + "b " * 8192) == 0  # too long to be one
        assert count_question(engine.open_prompt(request_of([5, 6, 7]))) == 0
