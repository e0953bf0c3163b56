"""Models that make vectors and write none: what is refused, long texts, many texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, PrefillConfig, SamplingParams
from edgeh2o.errors import ContextLengthError, UsageError
from tests.embedding_cases import ENCODER_CASES, options_of
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.tensors import Tensors

REFUSED = r"\({}\) makes vectors of texts and writes none: use 'edgeh2o embed', LLM.embed or /v1"


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(architecture="gemma-embedding", n_layers=3, pooling_type=1, dense_dim=96)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 300, length).tolist()


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_nothing_is_written(tiny_model: TinyModelFactory, case: str) -> None:
    options = options_of(case)
    message = REFUSED.format(options["architecture"])
    with LLM(tiny_model(**options), attention_precision="f32") as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(UsageError, match=message):
                call("a text")
        if case.startswith("gemma"):
            messages = [{"role": "user", "content": "a text"}]
            for chat in (llm.chat, llm.stream_chat):
                with pytest.raises(UsageError, match=message):
                    chat(messages)
        assert llm.embed("a text").shape == (llm.config.model_dim,)
        with pytest.raises(UsageError, match="there is no prompt to save"):
            llm.save_session("x.session")


def test_texts_longer_than_the_context_are_refused(
    tiny_model: TinyModelFactory, model: Path
) -> None:
    with LLM(model, context_size=100) as llm:
        assert llm.embed(tokens_of(100)).shape == (llm.config.model_dim,)
        for pooling in ("mean", "cls", "last"):  # of the first token the others are a part
            with pytest.raises(
                ContextLengthError, match="has 101 tokens and the context holds 100"
            ):
                llm.embed(tokens_of(101), pooling)
    table = tiny_model(architecture="bert", n_layers=1, context_length=64)
    message = "the model has a table of 64 positions"
    with LLM(table) as llm, pytest.raises(ContextLengthError, match=message):
        llm.embed(tokens_of(65), "mean")
    with pytest.raises(UsageError, match="a context of 65 is longer than the table of 64"):
        LLM(table, context_size=65)


def test_rules_of_prompts_are_refused(model: Path) -> None:
    with LLM(model, attention=DenseConfig()) as llm:
        assert llm.embed("a").shape == (llm.config.model_dim,)
    with pytest.raises(UsageError, match=r"read those behind them too.*leave --attention and its"):
        LLM(model, attention=H2OConfig(local=12, heavy=12))


def test_calls_and_chunks_change_nothing(model: Path) -> None:
    """A text is one call, whatever prompts would be read in."""
    texts = [tokens_of(n, n) for n in (5, 300, 64, 1, 513)]
    found = []
    for prefill in (PrefillConfig(), PrefillConfig(batch_size=64, chunk_size=32)):
        with LLM(model, prefill=prefill) as llm:
            many = llm.embed(texts, "mean")
            for row, text in zip(many, texts, strict=True):
                np.testing.assert_array_equal(row, llm.embed(text, "mean"))
            found.append(many)
    np.testing.assert_array_equal(found[0], found[1])


def test_no_profile_is_made(model: Path) -> None:
    with LLM(model) as llm:
        assert not llm.profile_budgets(np.array(tokens_of(2048), np.int32))
        assert not llm.may_round_attention
        assert llm.embed(tokens_of(2048)).shape == (llm.config.model_dim,)


def test_a_runner_of_it_reads_one_text(model: Path) -> None:
    with LLM(model) as llm:
        runner = llm.start_runner(50)
        assert (runner.batch_size, runner.chunk_size, runner.max_context) == (50, 50, 50)
        with pytest.raises(ValueError, match="nothing is written behind it"):
            runner.decode(5)


def test_sampling_is_checked_as_ever(model: Path) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match="sampling must be"):
        llm.generate("a", 5)  # type: ignore[arg-type]
    with LLM(model) as llm, pytest.raises(UsageError, match="writes none"):
        llm.generate("a", SamplingParams(max_tokens=0))


def test_rerankers_make_vectors_that_are_asked_for(tiny_model: TinyModelFactory) -> None:
    options = {**options_of("modern-bert"), "pooling_type": 4, "rank_labels": ("LABEL_0",)}
    with LLM(tiny_model(**options)) as llm:
        with pytest.raises(UsageError, match=r"is a reranking model, which ranks by .*LLM.rerank"):
            llm.embed("a text")
        assert llm.embed("a text", "cls").shape == (llm.config.model_dim,)
        assert llm.rerank("a", ["b"]).shape == (1,)


def test_heads_that_an_architecture_does_not_rank_by_are_left_out(tmp_path: Path) -> None:
    def add_classifier(tensors: Tensors) -> None:
        width = tensors["token_embd.weight"].shape[1]
        for name in ("cls.weight", "cls.output.weight"):
            tensors[name] = np.ones((width, width), np.float32)
        tensors["cls.bias"] = np.ones(width, np.float32)

    path = tmp_path / "reranker.gguf"
    options = {**options_of("nomic-bert"), "pooling_type": 4}
    write_tiny_model(path, edit=add_classifier, **options)
    with LLM(path) as llm:
        with pytest.raises(UsageError, match=r"does not rank.* by which its architecture ranks"):
            llm.rerank("a", ["b"])
        assert llm.embed("a text", "cls").shape == (llm.config.model_dim,)
