"""Answers that go on past the context: what is kept, and that the rest leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import (
    LLM,
    DenseConfig,
    H2OConfig,
    HeadwiseConfig,
    PrefillConfig,
    QuestConfig,
    RocketKvConfig,
    SamplingParams,
)
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.engine.full_context import choose_kept, prepare_full_context
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.sampling_config import SHIFT_WHEN_FULL
from tests.budget_tables import table_of_model
from tests.engine.fakes import ScriptedRunner
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
    message = r"context_full \(--context-full\) must be stop, shift or evict, got 'rotate'"
    with pytest.raises(UsageError, match=message):
        SamplingParams(context_full="rotate")


EVICTION = replace(SAMPLING, context_full="evict", lookup="auto")
H2O = H2OConfig(local=8, heavy=4)


def _evicting(llm: LLM, prompt: list[int], n_tokens: int) -> list[int]:
    """Greedy tokens, with a quarter of the context dropped whenever it is full."""
    runner: Any = llm.start_runner(CONTEXT)
    runner.allow_eviction(True)
    logits, tokens = prefill_prompt(runner, np.array(prompt, np.int32)), []
    ending = list(llm.model.tokenizer.eog_ids)
    while len(tokens) < n_tokens:
        tokens.append(
            int(np.argmax(np.where(np.isin(np.arange(len(logits)), ending), -np.inf, logits)))
        )
        if runner.position - runner.n_evicted == CONTEXT:
            runner.evict(CONTEXT // 4)
        logits = runner.decode(tokens[-1])
    return tokens


@pytest.mark.parametrize("attention", [DenseConfig(), H2O, HeadwiseConfig()], ids=str)
@pytest.mark.parametrize("n_prompt", [5, CONTEXT])
def test_goes_on_by_eviction(
    tiny_model: TinyModelFactory, attention: SparseAttentionConfig, n_prompt: int
) -> None:
    prompt = random_tokens(n_prompt).tolist()
    sampling = replace(EVICTION, temperature=0.0)
    for threads in (1, 3):
        with _load(tiny_model(), attention=attention, threads=threads) as llm:
            result = llm.generate(prompt, sampling)
            if threads == 1:
                expected = _evicting(llm, prompt, 200)
            assert list(result.token_ids) == expected
            stats = result.stats
            n_rows = n_prompt + 199
            assert stats.evicted_tokens == -(-(n_rows - CONTEXT) // 24) * 24
            assert (stats.context_shifts, stats.fills_context) == (0, False)
            assert f"{stats.evicted_tokens} tokens evicted" in stats.format_table()
            again = llm.generate(prompt, replace(sampling, max_tokens=400)).stats
            assert again.memory_bytes == stats.memory_bytes


@pytest.mark.parametrize(
    "architecture", ["lfm2", "qwen35", "granitehybrid", "falcon-h1", "minicpm3"]
)
def test_layers_of_every_kind_go_on_by_eviction(
    tiny_model: TinyModelFactory, architecture: str
) -> None:
    """Recurrent states have no rows to lose; latent rows are keys and values at once."""
    path = tiny_model(architecture=architecture, n_layers=4)
    prompt, sampling = random_tokens(40).tolist(), replace(EVICTION, temperature=0.0)
    for threads in (1, 3):
        with _load(path, attention=H2O, threads=threads) as llm:
            result = llm.generate(prompt, sampling)
            if threads == 1:
                expected = _evicting(llm, prompt, 200)
            assert list(result.token_ids) == expected
            assert result.stats.evicted_tokens == 144


def test_an_eviction_lets_decode_read_everything(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """By default, where the table would let generated tokens read what the budgets hold."""
    path, prompt = tiny_model(context_length=4096), random_tokens(2200).tolist()
    sampling = replace(EVICTION, temperature=0.0, max_tokens=100)
    stopping = replace(sampling, context_full="stop", max_tokens=4)
    harmless = DecodeQuality(budget=64, length=4096, kl={"prose": 0.0})
    sizes = {"chunk_size": 256, "length": 4096, "mean_past": 2000.0, "levels": (64, 128)}
    with LLM(path) as llm:
        table = table_of_model(llm.config, ((1.0, 0.5),), decode=harmless, **sizes)
    write_table(table, tmp_path / "table.json")
    attention = HeadwiseConfig(budget=64, budget_table=str(tmp_path / "table.json"))
    with LLM(path, attention=attention, context_size=2250) as llm:
        result = llm.generate(prompt, stopping, keep_cache=True)
        assert result.stats.attention["decode"] == "headwise"
        # What was read for such a decode does not serve one that evicts, and is read again.
        result = llm.generate(prompt, sampling, keep_cache=True)
        assert "decode" not in result.stats.attention
        assert result.stats.cached_tokens == 0
        assert result.stats.evicted_tokens > 0
    with (
        LLM(path, attention=replace(attention, decode_attention="headwise")) as llm,
        pytest.raises(UsageError, match="cannot go on by --context-full evict"),
    ):
        llm.generate(prompt, sampling)


def test_a_context_that_suffices_evicts_nothing(tiny_model: TinyModelFactory) -> None:
    prompt = random_tokens(60).tolist()
    with _load(tiny_model(), context_size=260) as llm:
        stopping, evicting = (
            llm.generate(prompt, replace(EVICTION, context_full=way)) for way in ("stop", "evict")
        )
    assert stopping.token_ids == evicting.token_ids
    assert evicting.stats.evicted_tokens == 0
    assert evicting.stats.memory_bytes["scores"] > stopping.stats.memory_bytes["scores"]


@pytest.mark.parametrize("attention", [DenseConfig(), H2O], ids=str)
def test_prompts_longer_than_the_context_are_read(
    tiny_model: TinyModelFactory, attention: SparseAttentionConfig
) -> None:
    prompt = random_tokens(400).tolist()
    answers = []
    with _load(tiny_model(), attention=attention) as llm:
        for _ in range(2):
            answers.append(llm.generate(prompt, replace(EVICTION, max_tokens=20)))
            llm.generate(prompt[:10], replace(EVICTION, max_tokens=3))
        with pytest.raises(UsageError, match="400 tokens and the context holds 96"):
            llm.generate(prompt, SAMPLING)
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.evicted_tokens >= 400 + 19 - CONTEXT
    assert answers[0].stats.prompt_tokens == 400


def test_a_prompt_past_the_context_teaches_nothing(tiny_model: TinyModelFactory) -> None:
    """Its beginning would have to be read whole."""
    with LLM(tiny_model(n_layers=1), attention=HeadwiseConfig(), context_size=600) as llm:
        result = llm.generate(random_tokens(2400).tolist(), replace(EVICTION, max_tokens=2))
    assert result.stats.evicted_tokens >= 1800
    assert len(result.token_ids) == 2


def test_the_next_turn_goes_on_from_what_was_not_evicted(tiny_model: TinyModelFactory) -> None:
    prompt = random_tokens(30).tolist()
    with _load(tiny_model()) as llm:
        first = llm.generate(prompt, EVICTION, keep_cache=True)
        turn = [*prompt, *first.token_ids, *random_tokens(20, seed=8).tolist()]
        second = llm.generate(turn, EVICTION, keep_cache=True)
        assert second.stats.cached_tokens == len(prompt) + 199
        assert second.stats.evicted_tokens > 0
        # To where nothing can be gone back to: read anew, past the context.
        third = llm.generate(turn[:200], EVICTION, keep_cache=True)
        assert third.stats.cached_tokens == 0
        with pytest.raises(UsageError, match="the context holds 96"):
            llm.generate(turn, SAMPLING, keep_cache=True)


def test_sessions_after_an_eviction_are_refused_by_name(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    with _load(tiny_model()) as llm:
        llm.generate(random_tokens(30).tolist(), EVICTION, keep_cache=True)
        with pytest.raises(ResourceError, match=r"cannot be saved: .* evicted.*-full shift"):
            llm.save_session(tmp_path / "kept.eh2o")
        llm.save_session(tmp_path / "kept.eh2o", extra={"messages": []})
        assert llm.load_session(tmp_path / "kept.eh2o") == {"messages": []}


@pytest.mark.parametrize(
    ("options", "sampling", "message"),
    [
        ({"attention": QuestConfig()}, EVICTION, r"quest.* says what generated tokens read"),
        ({"attention": RocketKvConfig()}, EVICTION, r"rocketkv.* says what generated tokens read"),
        ({"context_size": 48}, EVICTION, r"48 positions is too short.*--context-full evict"),
        (
            {},
            replace(EVICTION, lookup="3"),
            r"\(--lookup\) 3 does not go with --context-full evict",
        ),
    ],
)
def test_what_does_not_go_with_eviction(
    tiny_model: TinyModelFactory, options: dict[str, Any], sampling: SamplingParams, message: str
) -> None:
    with (
        _load(tiny_model(), **options) as llm,
        pytest.raises(UsageError, match=message),
    ):
        llm.generate([1, 2, 3], sampling)


def test_other_runners_are_refused() -> None:
    with pytest.raises(UsageError, match="evict is for GGUF and safetensors models on the CPU"):
        prepare_full_context(ScriptedRunner([1]), "evict")
