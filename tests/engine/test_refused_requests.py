"""A request that is refused leaves the model, its kept cache and a stream as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM, PrefillConfig, QuestConfig, SamplingParams
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.host import memory
from tests.model.model_pair import random_tokens
from tests.tiny_models import TinyModelFactory

CONTEXT = 96
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = random_tokens(40).tolist()
OTHER = [7, *random_tokens(20).tolist()]
NOT_A_SCHEMA: Any = 5


def _load(path: Any, **options: Any) -> LLM:
    prefill = PrefillConfig(batch_size=64, chunk_size=16)
    return LLM(path, prefill=prefill, **({"context_size": CONTEXT} | options))


def _sampling(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0, **options)


Refused = tuple[dict[str, Any], dict[str, Any], SamplingParams, str]
REFUSED: list[Refused] = [
    ({}, {}, _sampling(schema=NOT_A_SCHEMA), "a JSON schema is an object"),
    ({}, {}, _sampling(schema={"type": "no"}), "json_schema cannot be used"),
    ({}, {}, _sampling(logit_bias={320: 1}), "names a token beyond the vocabulary, whose last is"),
    ({}, {"context_size": 60}, _sampling(context_full="shift"), "60 positions is too short"),
    ({}, {"context_size": 60}, _sampling(context_full="evict"), "60 positions is too short"),
    ({}, {"cache_type": "q8_0"}, _sampling(context_full="evict"), "q8_0 would be rounded"),
    ({}, {"attention": QuestConfig()}, _sampling(context_full="evict"), "this policy .quest"),
    (
        {"architecture": "maincoder"},
        {},
        _sampling(context_full="evict"),
        "normalises its keys after their rotation",
    ),
    ({}, {}, _sampling(context_full="evict", lookup="4"), "lookup .* does not go with"),
]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT[:10], OTHER, PROMPT], ids=["part", "other", "same"])
@pytest.mark.parametrize(("model", "options", "sampling", "message"), REFUSED)
def test_a_refused_request_leaves_the_cache(
    tiny_model: TinyModelFactory,
    model: dict[str, Any],
    options: dict[str, Any],
    sampling: SamplingParams,
    message: str,
    prompt: list[int],
    keeps: bool,
) -> None:
    with _load(tiny_model(**model), **options) as llm:
        first = llm.generate(PROMPT, GREEDY, keep_cache=True)
        held = list(llm._session.runner.token_ids) if llm._session.runner else []
        assert len(held) >= len(PROMPT)
        with pytest.raises(UsageError, match=message):
            llm.generate(prompt, sampling, keep_cache=keeps)
        assert llm.has_open_prompt
        assert llm._session.runner is not None
        assert list(llm._session.runner.token_ids) == held
        again = llm.generate([*PROMPT, *first.token_ids, 5], GREEDY, keep_cache=True)
        assert again.stats.cached_tokens == len(held)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda llm: llm.generate([], GREEDY),
        lambda llm: llm.generate([1] * (CONTEXT + 1), GREEDY),
        lambda llm: llm.generate([3, 4], GREEDY, keep_cache="no"),
        lambda llm: llm.stream([3, 4], GREEDY, logprobs=5),
        lambda llm: llm.generate([3, 4], _sampling(schema=NOT_A_SCHEMA), keep_cache=True),
        lambda llm: llm.stream([3, 4], _sampling(context_full="evict", lookup="4")),
    ],
)
def test_a_refused_request_leaves_a_stream(
    tiny_model: TinyModelFactory, refuse: Callable[[LLM], object]
) -> None:
    with _load(tiny_model()) as llm:
        expected = llm.generate(PROMPT, GREEDY)
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        with pytest.raises(UsageError):
            refuse(llm)
        assert stream.finish().token_ids == expected.token_ids


def test_a_session_file_that_fails_ends_the_stream(
    tiny_model: TinyModelFactory, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from the cache that the file had emptied."""
    from edgeh2o.errors import FormatError
    from edgeh2o.runners.base import RunnerState

    path = tmp_path / "session"
    with _load(tiny_model()) as llm:
        llm.generate(PROMPT, GREEDY, keep_cache=True)
        llm.save_session(path)
        stream = llm.stream(OTHER, GREEDY, keep_cache=True)
        next(stream)

        def fail(state: object, runner: object) -> None:
            raise FormatError("the saved state does not fit")

        monkeypatch.setattr(RunnerState, "restore", fail)
        with pytest.raises(FormatError, match="does not fit"):
            llm.load_session(path)
        with pytest.raises(UsageError, match="this stream was ended"):
            next(stream)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "prompt"])
def test_what_does_not_fit_in_memory_leaves_the_cache(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_file: bool,
    keeps: bool,
) -> None:
    """It was freed to make room for the next one, which was refused then."""
    model = tiny_model(context_length=2**20)
    long, file = replace(GREEDY, max_tokens=2**20 - 100), tmp_path / "long.session"
    if is_file:
        with _load(model, context_size=None) as llm:
            llm.generate(OTHER * 300, GREEDY, keep_cache=True)
            llm.save_session(file)
    with _load(model, context_size=None) as llm:
        first = llm.generate(PROMPT, GREEDY, keep_cache=True)
        assert llm._session.runner is not None
        held = list(llm._session.runner.token_ids)
        monkeypatch.setattr(memory, "available_bytes", lambda: 0)
        with pytest.raises(ResourceError, match="available"):
            llm.load_session(file) if is_file else llm.generate(OTHER, long, keep_cache=keeps)
        assert llm.has_open_prompt
        again = llm.generate([*PROMPT, *first.token_ids, 5], GREEDY, keep_cache=True)
        assert again.stats.cached_tokens == len(held)
