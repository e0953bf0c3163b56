"""Answers that go on past the context: what is kept, and that the rest leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, PrefillConfig, SamplingParams
from edgeh2o.config import SHIFT_WHEN_FULL
from edgeh2o.engine.full_context import choose_kept
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.reading import prefill_prompt
from tests.model.model_pair import random_tokens
from tests.tiny_models import TinyModelFactory

CONTEXT = 96
SAMPLING = SamplingParams(
    max_tokens=200, temperature=0.8, seed=3, ignore_eos=True, context_full=SHIFT_WHEN_FULL
)


def _load(path: Any, **options: Any) -> LLM:
    prefill = PrefillConfig(batch_size=64, chunk_size=16)
    return LLM(path, prefill=prefill, **({"context_size": CONTEXT} | options))


@pytest.mark.parametrize(
    ("n_prompt", "expected"),
    [(1, [0, *range(9, 16)]), (2, [0, 1, *range(10, 16)]), (12, [0, 1, *range(10, 16)])],
)
def test_half_is_kept(n_prompt: int, expected: list[int]) -> None:
    kept = choose_kept(np.arange(16, dtype=np.int32), n_prompt)
    assert kept.tolist() == expected
    assert kept.dtype == np.int32


def _answer(llm: LLM, prompt: list[int], n_tokens: int) -> tuple[list[int], int]:
    """Greedy tokens, and how often a full cache was cut."""
    runner, cache, tokens, n_cuts = llm.start_runner(CONTEXT), list(prompt), [], 0
    logits = prefill_prompt(runner, np.array(prompt, np.int32))
    for _ in range(n_tokens):
        token = int(np.argmax(logits))
        tokens.append(token)
        if len(cache) == CONTEXT:
            cache = choose_kept(np.array(cache, np.int32), len(prompt)).tolist()
            runner.reset()
            prefill_prompt(runner, np.array(cache, np.int32))
            n_cuts += 1
        logits = runner.decode(token)
        cache.append(token)
        assert list(runner.token_ids) == cache
    return tokens, n_cuts


@pytest.mark.parametrize("n_prompt", [5, CONTEXT])
@pytest.mark.parametrize("lookup", ["off", "3"])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_goes_on_as_after_a_prompt_of_what_is_kept(
    tiny_model: TinyModelFactory, cache_type: str, lookup: str, n_prompt: int
) -> None:
    prompt = random_tokens(n_prompt).tolist()
    sampling = replace(SAMPLING, temperature=0.0, lookup=lookup)
    with _load(tiny_model(head_dim=32), cache_type=cache_type) as llm:
        result = llm.generate(prompt, sampling)
        tokens, n_cuts = _answer(llm, prompt, 200)
        assert list(result.token_ids) == tokens
        assert result.stats.context_shifts == n_cuts > 2
        assert result.finish_reason == "length"
        assert not result.stats.fills_context
        assert "cut to half" in result.stats.format_table()
        assert result.stats.memory_bytes == llm.generate(prompt[:3], sampling).stats.memory_bytes


def test_sampled_answers_do_not_depend_on_lookup(tiny_model: TinyModelFactory) -> None:
    prompt = random_tokens(40).tolist() * 2
    with _load(tiny_model()) as llm:
        first, second = (
            llm.generate(prompt, replace(SAMPLING, lookup=lookup)) for lookup in ("off", "5")
        )
    assert first.token_ids == second.token_ids
    assert first.text == second.text


def test_a_kept_prompt_goes_on_from_what_is_cached(tiny_model: TinyModelFactory) -> None:
    """The next turn after an answer that was cut reads all that the cache has not got."""
    prompt = random_tokens(30).tolist()
    sampling = replace(SAMPLING, temperature=0.0, max_tokens=100)
    with _load(tiny_model()) as llm:
        first = llm.generate(prompt, sampling, keep_cache=True)
        again = [*prompt, *first.token_ids[:40]]
        kept = llm.generate(again, sampling)
        llm.forget()
        assert llm.generate(again, sampling).token_ids == kept.token_ids


def test_a_context_that_is_too_short_is_refused(tiny_model: TinyModelFactory) -> None:
    with (
        _load(tiny_model(), context_size=48) as llm,
        pytest.raises(UsageError, match=r"48 positions is too short.*-c 64 or more"),
    ):
        llm.generate([1, 2, 3], SAMPLING)


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(UsageError, match=r"context_full \(--context-full\) must be stop or shift"):
        SamplingParams(context_full="evict")
