"""The drafting layer of a server: it drafts for one answer at a time, and changes no text."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import PrefillConfig, SamplingParams
from edgeh2o.engine.own_draft import OwnDraft
from edgeh2o.errors import ResourceError
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.events import Event, Piece
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.scheduler import CancelledError
from edgeh2o.serving.shared_draft import SharedOwnDraft
from edgeh2o.serving.ticket import Ticket
from tests.engine.right_layer import DRAFTING_OPTIONS, say_the_next
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tools.make_tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {
    "draft": "mtp",
    "attention": "dense",
    "prefill": PrefillConfig(batch_size=64, chunk_size=16),
}


@pytest.fixture(scope="module", params=["right", "wrong"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose layer guesses the model's tokens, and one of random weights."""
    made = tmp_path_factory.mktemp("layer") / f"{request.param}.gguf"
    edit = {"edit": say_the_next, "tied": False} if request.param == "right" else {}
    return write_tiny_model(made, context_length=1024, **edit, **DRAFTING_OPTIONS)


def asking(seed: int, n_tokens: int = 40, **sampling: Any) -> GenerationRequest:
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": seed, "lookup": "off"}
    options |= {"temperature": 0.0, "draft_tokens": "4"}
    made = request_of([*tokens_of(149, seed=seed), 5])
    return replace(made, sampling=SamplingParams(**{**options, **sampling}))


def without(model: Path, wanted: list[GenerationRequest]) -> list[Answered]:
    plain = [replace(each, sampling=replace(each.sampling, draft_tokens="off")) for each in wanted]
    with open_engine(model, **{**OPTIONS, "draft": None}, prefix_ram_bytes=0) as engine:
        return [answer(engine, each) for each in plain]


def compare(got: list[Answered], expected: list[Answered]) -> None:
    assert [each.text for each in got] == [each.text for each in expected]
    assert [each.logprobs for each in got] == [each.logprobs for each in expected]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_answer_after_the_other(path: Path, temperature: float) -> None:
    """Of several conversations, some of which go on."""
    wanted = [asking(seed, temperature=temperature) for seed in (1, 2, 1, 3, 2)]
    expected = without(path, wanted)
    with open_engine(path, **OPTIONS) as engine:
        got = [answer(engine, each) for each in wanted]
    compare(got, expected)
    assert all(each.stats.drafted_tokens > 0 for each in got)
    assert got[0].stats.draft_model == "mtp"
    if path.stem == "right" and temperature == 0.0:
        for each in got:
            assert each.stats.accepted_tokens == each.stats.drafted_tokens > 25


def test_neighbours_change_nothing(path: Path) -> None:
    wanted = [asking(seed, lookup="5" if seed % 2 else "off") for seed in range(6)]
    expected = without(path, wanted)
    with open_engine(path, **OPTIONS) as engine, ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            compare(list(threads.map(lambda each: answer(engine, each), wanted)), expected)
        again = answer(engine, asking(9))  # alone again
        assert again.stats.drafted_tokens > 25
    compare([again], without(path, [asking(9)]))


def rows_of(engine: AnswerEngine) -> tuple[list[int], int, list[np.ndarray]]:
    shared = engine.pool.draft
    assert isinstance(shared, SharedOwnDraft)
    paired = shared._draft._paired
    assert paired is not None
    runner: Any = paired._runner
    n_read, n_held = paired._end, int(runner.position)
    assert paired._base == 0
    rows = [np.asarray(each).view(np.float16) for each in runner.cached_rows()]
    return (
        paired.text[:n_read],
        n_read,
        [each[: len(each) // n_held * n_read].astype(np.float32) for each in rows],
    )


def test_it_has_read_every_token_with_its_row(path: Path) -> None:
    """In calls of the grid, whose last tokens wait for the next call: as in one call."""
    asked = asking(1, draft_tokens="2")
    texts = []
    for sizes in ({"batch_size": 64, "chunk_size": 16}, {"batch_size": 512, "chunk_size": 256}):
        with open_engine(path, **{**OPTIONS, "prefill": PrefillConfig(**sizes)}) as engine:
            answer(engine, asked)
            texts.append(rows_of(engine))
    (text, n_read, rows), (other, _, others) = texts
    n = min(n_read, len(other))
    assert n > 150 and text[:n] == other[:n]
    for one, two in zip(rows, others, strict=True):
        width = len(one) // n_read
        np.testing.assert_allclose(one[: n * width], two[: n * width], atol=0.02)


def test_who_is_cancelled_gives_it_back(path: Path) -> None:
    with open_engine(path, **OPTIONS) as engine:
        ticket, n_pieces = Ticket(), 0

        def send(event: Event) -> None:
            nonlocal n_pieces
            n_pieces += isinstance(event, Piece)
            if n_pieces == 9:
                ticket.cancel("gone")

        with pytest.raises(CancelledError, match="gone"):
            engine.answer(asking(4, 300), send, ticket)
        got = answer(engine, asking(1))
        assert got.stats.drafted_tokens > 20
    compare([got], without(path, [asking(1)]))


def test_only_one_answer_has_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_engine(path, **OPTIONS) as engine:
        shared = engine.pool.draft
        assert isinstance(shared, SharedOwnDraft)
        first, second = shared.for_conversation(), shared.for_conversation()
        asked = SamplingParams()
        assert first.prepared(SamplingParams(draft_tokens="off"), 64) is None
        assert isinstance(first.prepared(asked, 64), OwnDraft)
        assert second.prepared(asked, 64) is None
        second.give_back()
        assert second.prepared(asked, 64) is None
        first.give_back()
        assert isinstance(second.prepared(asked, 64), OwnDraft)
        second.give_back()

        def fail(sampling: SamplingParams, context: int) -> Any:
            raise ResourceError("no room")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared._draft, "prepared", fail)
            with caplog.at_level(logging.WARNING):
                assert first.prepared(asked, 64) is None
            assert "without the layer that drafts: no room" in caplog.text
        assert isinstance(second.prepared(asked, 64), OwnDraft)


def test_it_drafts_nothing_while_prompts_are_read(path: Path) -> None:
    with open_engine(path, **OPTIONS) as engine:
        with engine.scheduler.reading():
            busy = answer(engine, asking(1))
        assert busy.stats.drafted_tokens == 0
        assert answer(engine, asking(1)).stats.drafted_tokens > 25
