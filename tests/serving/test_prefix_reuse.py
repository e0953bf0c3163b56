"""What is read after a kept beginning equals a whole read, bit by bit; memory stays bounded."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import DenseConfig, HeadwiseConfig
from edgeh2o.engine.grammar import Grammar
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.events import Progress
from edgeh2o.serving.scheduler import CancelledError
from edgeh2o.serving.ticket import Ticket
from tests.serving.answering import ATTENTIONS, answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory


@pytest.fixture(scope="module", params=ATTENTIONS)
def engines(
    request: pytest.FixtureRequest, serving_model: Path
) -> Iterator[tuple[AnswerEngine, AnswerEngine]]:
    """One that keeps what it reads, and one that keeps nothing."""
    attention = ATTENTIONS[request.param]
    with (
        open_engine(serving_model, attention=attention) as keeping,
        open_engine(serving_model, attention=attention, prefix_ram_bytes=0) as forgetting,
    ):
        yield keeping, forgetting


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_prompts_with_edits_anywhere_get_the_answers_of_whole_reads(
    engines: tuple[AnswerEngine, AnswerEngine], data: st.DataObject
) -> None:
    keeping, forgetting = engines
    # No answer has tokens of prompts: one that goes on as an earlier answer does, by chance, would
    # go on from that, whose rows were generated.
    asked = partial(request_of, bias=dict.fromkeys(range(3, 300), -100.0))
    length = data.draw(st.integers(100, 900), label="length")
    prompt = tokens_of(length, seed=data.draw(st.integers(0, 5)))
    for turn in range(3):
        alone = answer(forgetting, asked(prompt))
        got = answer(keeping, asked(prompt))
        assert alone.stats.cached_tokens == 0
        assert (got.text, got.logprobs) == (alone.text, alone.logprobs)
        begin = data.draw(st.integers(0, len(prompt) - 1), label="begin")
        end = min(len(prompt), begin + data.draw(st.integers(0, 80), label="removed"))
        added = tokens_of(data.draw(st.integers(1, 200), label="added"), seed=100 + turn)
        prompt = prompt[:begin] + added + prompt[end:]


def test_a_second_question_reads_the_document_no_more(
    engines: tuple[AnswerEngine, AnswerEngine],
) -> None:
    keeping, forgetting = engines
    document = tokens_of(2000, seed=50)
    for number in range(3):
        prompt = document + tokens_of(20, seed=60 + number)
        got = answer(keeping, request_of(prompt))
        assert got.logprobs == answer(forgetting, request_of(prompt)).logprobs
        if number:
            # The last whole chunk before the question, and what the last call has at least.
            assert got.stats.cached_tokens >= 2000 - 2 * 64
    changed = [*document[:1000], 9, *document[1001:], *tokens_of(20, seed=70)]
    got = answer(keeping, request_of(changed))
    assert 700 <= got.stats.cached_tokens <= 1000
    assert got.logprobs == answer(forgetting, request_of(changed)).logprobs


def test_a_conversation_goes_on_from_its_answer(serving_model: Path) -> None:
    with open_engine(serving_model) as engine:
        text = "the hen is in the pen and " * 4
        letters = Grammar("regex", "[a-z ]{99}")  # tokens that are whole characters, and no end
        first = answer(engine, request_of(text, 10, grammar=letters))
        again = answer(engine, request_of(text + first.text + " the art", 4))
        # The last token was drawn and not read.
        assert again.stats.cached_tokens == first.stats.prompt_tokens + 9
        assert len(engine.pool) == 1


def test_the_log_names_the_token_at_which_a_prompt_departs(
    serving_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="edgeh2o.serving")
    first, other = tokens_of(400, seed=8), tokens_of(400, seed=8)
    other[300] = first[300] % 300 + 1
    with open_engine(serving_model) as engine:
        answer(engine, request_of(first))
        n_cached = answer(engine, request_of(other)).stats.cached_tokens
        text = engine.tokenizer.decode([other[300]])
    assert 0 < n_cached <= 300
    wanted = f"departs from a kept one at token 300, {text!r}; {n_cached} tokens are cached"
    assert wanted in caplog.text


def test_a_copy_leaves_the_other_conversation_to_go_on(serving_model: Path) -> None:
    with open_engine(serving_model) as engine:
        shared, tail = tokens_of(300, seed=1), tokens_of(800, seed=2)
        answer(engine, request_of(shared + tail))
        other = answer(engine, request_of(shared + tokens_of(100, seed=3)))
        assert 200 <= other.stats.cached_tokens <= 300
        back = answer(engine, request_of(shared + tail + [5, 6]))
        assert back.stats.cached_tokens >= 1000
        assert len(engine.pool) == 2


def test_what_is_kept_stays_within_its_bound(serving_model: Path) -> None:
    with open_engine(serving_model, prefix_ram_bytes=2**20) as engine:
        seen = []
        for seed in range(12):
            answer(engine, request_of(tokens_of(600, seed=seed)))
            assert engine.pool.n_bytes <= 2**20
            seen.append(len(engine.pool))
        assert 1 < max(seen) < 12
        # The latest are kept, the first are not.
        assert answer(engine, request_of(tokens_of(600, seed=11))).stats.cached_tokens == 600
        assert answer(engine, request_of(tokens_of(600, seed=0))).stats.cached_tokens == 0


@pytest.mark.parametrize("context", [8192, 65536])  # rows, and what the rule notes, in huge pages
@pytest.mark.parametrize("decode", ["dense", "headwise"])
def test_short_conversations_take_the_memory_of_their_tokens(
    tiny_model: TinyModelFactory, decode: str, context: int
) -> None:
    """Not that of the context that each of them may grow to, which huge pages would take."""
    attention = HeadwiseConfig(budget=512, decode_attention=decode)
    model = tiny_model(tensor_type="Q4_0", context_length=context, n_layers=2)
    options = {"context_size": context, "prefix_ram_bytes": 2**29, "attention": attention}
    with open_engine(model, **options) as engine:
        for seed in range(4):
            answer(engine, request_of(tokens_of(40, seed=seed), 2))
        before = psutil.Process().memory_info().rss
        for seed in range(4, 28):
            answer(engine, request_of(tokens_of(40, seed=seed), 2))
        assert len(engine.pool) == 28
        assert psutil.Process().memory_info().rss - before < 24 * 2**20  # of 24 * 4 MiB


def _keep_some(model: Path, n_tokens: int, n_kept: int) -> tuple[int, int, list[int]]:
    """What so many conversations count, what they take of memory, and the bytes of their marks."""
    attention = HeadwiseConfig(budget=512, decode_attention="headwise")
    options = {"context_size": 8192, "prefix_ram_bytes": 2**29, "attention": attention}
    with open_engine(model, **options) as engine:

        def taken() -> tuple[int, int]:
            memory.return_freed_memory()
            return psutil.Process().memory_info().rss, engine.pool.n_bytes

        for seed in range(4):
            answer(engine, request_of(tokens_of(n_tokens, seed=seed), 2))
        rss, counted = taken()
        for seed in range(4, 4 + n_kept):
            answer(engine, request_of(tokens_of(n_tokens, seed=seed), 2))
        more_rss, more_counted = taken()
        assert len(engine.pool) == 4 + n_kept
        marks = [each.runner.runner.mark_bytes for each in engine.pool.room.kept if each.runner]
    return more_counted - counted, more_rss - rss, marks


@pytest.mark.parametrize(("n_tokens", "n_kept"), [(40, 24), (3000, 6)])
def test_what_is_kept_counts_as_what_it_takes(
    tiny_model: TinyModelFactory, n_tokens: int, n_kept: int
) -> None:
    """Of short conversations what was written of the scores, of long ones the marks too."""
    model = tiny_model(tensor_type="Q4_0", context_length=8192, n_layers=2)
    # A process that ran other tests takes memory that these have left.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        counted, taken, marks = fresh.submit(_keep_some, model, n_tokens, n_kept).result()
    assert 0.6 < counted / taken < 1.4
    assert all(marks) and (sum(marks) > 2**20 or n_tokens < 1000)


def test_a_bound_keeps_as_many_short_conversations_as_it_has_room_for(
    tiny_model: TinyModelFactory,
) -> None:
    model = tiny_model(tensor_type="Q4_0", context_length=65536, n_layers=2)
    attention = HeadwiseConfig(budget=512)
    options = {"context_size": 65536, "prefix_ram_bytes": 8 * 2**20, "attention": attention}
    with open_engine(model, **options) as engine:  # each has 3 MiB of scores, hardly written
        for seed in range(16):
            answer(engine, request_of(tokens_of(40, seed=seed), 2))
        assert len(engine.pool) == 16
        assert answer(engine, request_of(tokens_of(40, seed=0), 2)).stats.cached_tokens == 40


def test_requests_wait_for_memory_that_others_are_yet_to_write(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has taken yet is not free: a container's limit ended the server."""
    busy: list[int] = []
    with open_engine(serving_model, attention=DenseConfig(), context_size=8192) as engine:
        pool = engine.pool
        monkeypatch.setattr(pool.room, "estimate", lambda *_: (12 * 2**20, 8 * 2**20))
        room = RESERVE_BYTES + 34 * 2**20
        monkeypatch.setattr(memory, "available_bytes", lambda: room)

        def ask(seed: int) -> str:
            request = request_of(tokens_of(4000, seed=seed), 64)
            events: list[object] = []

            def emit(event: object) -> None:
                events.append(event)
                busy.append(sum(each.is_busy for each in pool.room.kept))

            engine.answer(request, emit, Ticket())
            return type(events[-1]).__name__

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(ask, range(3))) == ["Finished"] * 3
        assert max(busy) == 1
        monkeypatch.setattr(memory, "available_bytes", lambda: 2 * room)
        busy.clear()
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(ask, range(3, 5))) == ["Finished"] * 2
        assert max(busy) == 2


def test_a_request_that_waits_for_memory_can_be_given_up(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Ticket()
    with open_engine(serving_model, attention=DenseConfig(), context_size=8192) as engine:
        monkeypatch.setattr(engine.pool.room, "estimate", lambda *_: (12 * 2**20, 8 * 2**20))
        room = RESERVE_BYTES + 34 * 2**20
        monkeypatch.setattr(memory, "available_bytes", lambda: room)

        def emit(event: object) -> None:
            if isinstance(event, Progress) and threads is not None and not others:
                other = request_of(tokens_of(4000, seed=1), 8)
                others.append(threads.submit(engine.answer, other, lambda _: None, waiting))
                waiting.cancel("the client has gone")
                with pytest.raises(CancelledError, match="client has gone"):
                    others[0].result(20)

        others: list[Future[None]] = []
        with ThreadPoolExecutor(1) as threads:
            engine.answer(request_of(tokens_of(4000, seed=0), 8), emit, Ticket())
        assert len(others) == 1 and len(engine.pool) == 1


def test_a_cancelled_prompt_goes_on_where_it_was_left(serving_model: Path) -> None:
    with open_engine(serving_model) as engine, open_engine(serving_model) as other:
        prompt, ticket = tokens_of(1500, seed=9), Ticket()

        def emit(event: object) -> None:
            if isinstance(event, Progress) and event.done > 700:
                ticket.cancel("the client has gone")

        with pytest.raises(CancelledError, match="client has gone"):
            engine.answer(request_of(prompt), emit, ticket)
        got = answer(engine, request_of(prompt))
        assert 400 <= got.stats.cached_tokens <= 800
        assert got.logprobs == answer(other, request_of(prompt)).logprobs


def test_a_prompt_beyond_the_context_is_refused(serving_model: Path) -> None:
    with open_engine(serving_model, context_size=512) as engine:
        with pytest.raises(ApiError, match="maximum context length is 512") as caught:
            answer(engine, request_of(tokens_of(513, seed=1)))
        assert caught.value.code == "context_length_exceeded"
        full = answer(engine, request_of(tokens_of(510, seed=1), 50))
        assert full.finish_reason == "length"
        assert full.stats.generated_tokens == 3


def test_what_is_dropped_is_free_at_once(serving_model: Path) -> None:
    """Not when the collector of cycles comes: until then a cache may have filled the memory."""
    gc.collect()
    gc.disable()
    try:
        with open_engine(serving_model, prefix_ram_bytes=0) as engine:
            seen: list[weakref.ref[object]] = []

            def emit(ticket: Ticket, event: object) -> None:
                if isinstance(event, Progress) and event.done > 300:
                    kept = engine.pool.room.kept[0]
                    seen.extend(map(weakref.ref, (kept, kept.session, kept.runner)))
                    ticket.cancel("the client has gone")

            for seed in range(3):
                ticket = Ticket()
                with pytest.raises(CancelledError):
                    engine.answer(
                        request_of(tokens_of(900, seed=seed)), partial(emit, ticket), ticket
                    )
                answer(engine, request_of(tokens_of(100, seed=seed)))
            assert len(engine.pool) == 0
            assert seen and not [each() for each in seen if each() is not None]
    finally:
        gc.enable()


def test_what_does_not_fit_in_memory_drops_nothing(
    serving_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every conversation went, one after the other, before the prompt was refused."""
    with open_engine(serving_model, prefix_ram_bytes=2**30) as engine:
        prompts = [tokens_of(300, seed) for seed in range(2)]
        for prompt in prompts:
            answer(engine, request_of(prompt))
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 0)
            with pytest.raises(ResourceError, match="available"):
                answer(engine, request_of(tokens_of(20, 9), 8000))
        assert len(engine.pool) == 2
        assert all(answer(engine, request_of(p)).stats.cached_tokens > 200 for p in prompts)
