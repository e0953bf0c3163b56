"""A server's engine on the host device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgeh2o import PrefillConfig
from edgeh2o.serving.requests import GenerationRequest
from tests.cuda.host_library import SMALL
from tests.serving.answering import Answered, answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")


def answers(model: Path, wanted: list[GenerationRequest], *, at_once: bool) -> list[Answered]:
    chunks = PrefillConfig(batch_size=32, chunk_size=16)
    options = {"device": "cuda", "context_size": 256, "attention": "dense", "prefill": chunks}
    with (
        open_engine(model, **options) as engine,
        ThreadPoolExecutor(len(wanted) if at_once else 1) as threads,
    ):
        return list(threads.map(lambda request: answer(engine, request), wanted))


def test_requests_at_once_and_one_that_goes_on(tiny_model: TinyModelFactory) -> None:
    """Each gets what it gets alone, bit by bit; what a kept prompt shares is not read again."""
    path = tiny_model(**SMALL)
    wanted = [request_of(tokens_of(n, seed=n), 5) for n in (5, 40, 23)]
    expected = answers(path, wanted, at_once=False)
    got = answers(path, wanted, at_once=True)
    for one, other in zip(got, expected, strict=True):
        assert (one.text, one.logprobs) == (other.text, other.logprobs)
    first = tokens_of(120, seed=40)
    longer = request_of([*first, *tokens_of(9, seed=1)], 3)
    *_, reused = answers(path, [request_of(first, 2), longer], at_once=False)
    (whole,) = answers(path, [longer], at_once=False)
    assert reused.stats.cached_tokens == 96
    assert reused.logprobs == whole.logprobs
