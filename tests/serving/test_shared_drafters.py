"""Drafters in files of their own in a server: they change no text, whoever else is written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import PrefillConfig, SamplingParams
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.shared_draft import SharedCacheDraft, SharedOwnDraft
from tests.engine.right_drafters import WRITERS
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine

OPTIONS: dict[str, Any] = {
    "attention": "dense",
    "prefill": PrefillConfig(batch_size=64, chunk_size=16),
    "prefix_ram_bytes": 0,
}


@pytest.fixture(scope="module", params=["assistant", "dflash"])
def paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


def asking(seed: int, **sampling: Any) -> GenerationRequest:
    options = {"max_tokens": 30, "ignore_eos": True, "seed": seed, "lookup": "off"}
    options |= {"temperature": 0.0, "draft_tokens": "4"}
    made = request_of([*tokens_of(149, seed=seed), 5])
    return replace(made, sampling=SamplingParams(**{**options, **sampling}))


def compare(got: list[Answered], expected: list[Answered]) -> None:
    assert [each.text for each in got] == [each.text for each in expected]
    assert [each.logprobs for each in got] == [each.logprobs for each in expected]


def test_answers_one_by_one_and_side_by_side(paths: tuple[Path, Path]) -> None:
    """Of conversations that go on; eagle3 is lent as a layer of the model is."""
    wanted = [asking(seed, temperature=float(seed % 2)) for seed in (1, 2, 2, 3)]
    with open_engine(paths[0], **OPTIONS) as engine:
        expected = [answer(engine, each) for each in wanted]
    with open_engine(paths[0], draft=paths[1], **OPTIONS) as engine:
        shared = engine.pool.draft
        assert isinstance(shared, SharedCacheDraft | SharedOwnDraft)
        one_by_one = [answer(engine, each) for each in wanted]
        with ThreadPoolExecutor(3) as threads:
            beside = list(threads.map(lambda each: answer(engine, each), wanted))
        again = answer(engine, wanted[1])
    compare(one_by_one, expected)
    compare(beside, expected)
    compare([again], expected[1:2])
    for each in (one_by_one[1], one_by_one[2], again):
        assert each.stats.accepted_tokens == each.stats.drafted_tokens > 10
        assert each.stats.draft_model == str(paths[1])


def test_layers_that_keep_nothing_draft_for_all(tmp_path: Path) -> None:
    """An answer that began beside another one drafts too, once that is over."""
    paths = WRITERS["assistant"](tmp_path)
    with open_engine(paths[0], draft=paths[1], **OPTIONS) as engine, ThreadPoolExecutor(2) as pool:
        short, long = asking(1, max_tokens=4), asking(2, max_tokens=200)
        answers = list(pool.map(lambda each: answer(engine, each), (short, long)))
    assert answers[1].stats.accepted_tokens > 100
