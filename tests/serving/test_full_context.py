"""Answers that go on past the context, several at a time."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.requests import GenerationRequest
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine

CONTEXT = 256


def _past_context(way: str, seed: int) -> GenerationRequest:
    made = request_of(tokens_of(CONTEXT - 50, seed=seed), 150)
    return replace(made, sampling=replace(made.sampling, context_full=way))


@pytest.mark.parametrize("way", ["evict", "shift"])
def test_neighbours_change_nothing(serving_model: Path, way: str) -> None:
    requests = [_past_context(way, seed) for seed in range(2)]
    with (
        open_engine(serving_model, context_size=CONTEXT) as engine,
        ThreadPoolExecutor(2) as threads,
    ):
        together = list(threads.map(lambda request: answer(engine, request), requests))
        alone = [answer(engine, request) for request in requests]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]
    for each in together:
        assert each.finish_reason == "length"
        assert len(each.logprobs) == 150
        assert (each.stats.evicted_tokens > 0) == (way == "evict")
        assert (each.stats.context_shifts > 0) == (way == "shift")


@pytest.mark.parametrize("verb", ["serve", "batch"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-full", "evict", "--cache-type", "q8_0"], "q8_0 would be rounded anew"),
        (["--context-full", "evict", "--lookup", "4"], "--lookup.* does not go with"),
        (["--context-full", "evict", "--attention", "quest"], "says what generated tokens read"),
        (["--context-full", "shift", "-c", "40"], "40 positions is too short"),
    ],
)
def test_options_by_which_every_request_would_be_refused_are(
    serving_model: Path,
    tmp_path: Path,
    verb: str,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first one comes."""
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": "the hen", "max_tokens": 2}
    requests.write_text(json.dumps({"custom_id": "1", "url": "/v1/completions", "body": body}))
    files = [str(requests), "-o", str(tmp_path / "out.jsonl")]
    arguments = files if verb == "batch" else ["--port", "0"]
    assert main([verb, str(serving_model), *arguments, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["serve", "batch"])
def test_a_prompt_longer_than_the_context_is_refused_as_the_help_says(
    serving_model: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "A prompt that is longer than the context is refused" in text
    assert "while a prompt is read that is longer" not in text
    made = request_of(tokens_of(CONTEXT + 50, seed=1), 4)
    evicting = replace(made, sampling=replace(made.sampling, context_full="evict"))
    with (
        open_engine(serving_model, context_size=CONTEXT) as engine,
        pytest.raises(ApiError, match="maximum context length is 256"),
    ):
        answer(engine, evicting)
