"""LongRoPE has two tables, by the length of the context: a cache serves contexts of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.engine import session_file
from edgeh2o.engine.results import GenerationResult
from edgeh2o.errors import UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.serving.answering import answer, request_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory

FEW = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TOKENS = np.random.default_rng(0).integers(3, 200, 4600).tolist()
SHORT, LONG = TOKENS[:100], TOKENS
LONG_AFTER = 4500  # beyond the least context, and no multiple of a step
TRAINED = 5632  # an open answer goes on as far


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(
        architecture="phi3",
        rope_scaling="longrope",
        original_context=LONG_AFTER,
        context_length=TRAINED,
    )


def _load(model: Path, context_size: int | None = None) -> LLM:
    # In f32, because bf16 rounds otherwise when chunks are cut otherwise.
    options = {"attention": DenseConfig(), "attention_precision": "f32"}
    return LLM(model, context_size=context_size, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[int, GenerationResult]:
    """Answers to prompts of these lengths that nothing came before."""
    results = {}
    for n_tokens in (len(SHORT), 4200, len(LONG)):
        with _load(model) as llm:
            results[n_tokens] = llm.generate(TOKENS[:n_tokens], FEW, logprobs=True)
    return results


def _is_like(result: GenerationResult, other: GenerationResult) -> bool:
    return result.token_ids == other.token_ids and np.allclose(
        result.logprobs or (), other.logprobs or (), atol=1e-3
    )


def test_a_chat_that_outgrows_the_short_table_is_read_again(
    model: Path, whole: dict[int, GenerationResult]
) -> None:
    with _load(model) as llm:
        for n_tokens, n_cached in ((len(SHORT), 0), (4200, len(SHORT)), (len(LONG), 0)):
            result = llm.generate(TOKENS[:n_tokens], FEW, keep_cache=True, logprobs=True)
            assert result.stats.cached_tokens == n_cached
            assert _is_like(result, whole[n_tokens])


def test_a_short_prompt_after_a_long_one_has_the_short_table(
    model: Path, whole: dict[int, GenerationResult]
) -> None:
    with _load(model) as llm:
        for prompt in (LONG, SHORT):
            result = llm.generate(prompt, FEW, logprobs=True)
            assert _is_like(result, whole[len(prompt)])


def test_a_session_file_goes_on_by_its_table(
    model: Path, whole: dict[int, GenerationResult], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with _load(model) as llm:
        llm.generate(TOKENS[:4000], FEW, keep_cache=True)
        llm.save_session(path)
    with _load(model) as llm:
        llm.load_session(path)  # an open answer would need the other table
        result = llm.generate(TOKENS[:4200], FEW, keep_cache=True, logprobs=True)
    assert result.stats.cached_tokens == 4000
    assert _is_like(result, whole[4200])
    with _load(model, context_size=TRAINED) as llm, pytest.raises(UsageError, match="use -c 4096"):
        llm.load_session(path)


def test_a_session_file_of_a_long_context_is_taken_up_in_one(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with _load(model, context_size=TRAINED) as llm:
        llm.generate(SHORT, FEW, keep_cache=True)
        llm.save_session(path)
        alone = llm.generate(TOKENS[:4200], FEW, logprobs=True)
    assert session_file.peek_session(path).context == TRAINED
    with _load(model) as llm:
        llm.load_session(path)
        result = llm.generate(
            TOKENS[:4200],
            SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True),
            keep_cache=True,
            logprobs=True,
        )
    assert result.stats.cached_tokens == len(SHORT)
    assert result.token_ids[:8] == alone.token_ids


def test_a_session_file_without_a_cache_fits_every_context(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with _load(model) as llm:
        llm.save_session(path, extra={"a": 1})
    with _load(model, context_size=TRAINED) as llm:
        assert llm.load_session(path) == {"a": 1}


def test_served_conversations_are_those_of_whole_reads(model: Path, tmp_path: Path) -> None:
    prompts = [TOKENS[:4000], LONG, TOKENS[:4100]]
    with open_engine(model, attention=DenseConfig(), prefix_ram_bytes=0) as forgetting:
        alone = [answer(forgetting, request_of(prompt)) for prompt in prompts]
    with open_engine(model, attention=DenseConfig(), prefix_disk=(tmp_path, 2**28)) as keeping:
        for prompt, expected in zip(prompts, alone, strict=True):
            got = answer(keeping, request_of(prompt))
            assert (got.text, got.logprobs) == (expected.text, expected.logprobs)
    with open_engine(model, attention=DenseConfig(), prefix_disk=(tmp_path, 2**28)) as again:
        for prompt, expected in zip(reversed(prompts), reversed(alone), strict=True):
            got = answer(again, request_of(prompt))
            assert (got.text, got.logprobs) == (expected.text, expected.logprobs)


def test_an_open_answer_goes_on_as_far_as_its_table(model: Path) -> None:
    request = request_of(TOKENS[:4200], -1)
    with open_engine(model, attention=DenseConfig()) as engine:
        got = answer(engine, request)
    # With its 1,024 tokens it needs the table of long contexts, to whose end it goes on.
    assert got.stats.context_size == TRAINED
    with open_engine(model, attention=DenseConfig()) as engine:
        got = answer(engine, request_of(TOKENS[:3000], -1))
    assert 3000 + got.stats.generated_tokens == LONG_AFTER + 1
