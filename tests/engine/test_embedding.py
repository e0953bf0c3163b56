"""Vectors of texts: pooling against float64, llama.cpp's vectors, what is refused, what stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, PrefillConfig, SamplingParams
from edgeh2o.engine.embedding import POOLINGS, choose_pooling, normalise, require_rows
from edgeh2o.errors import ContextLengthError, EdgeH2OError, FormatError, UsageError
from edgeh2o.model_config import ModelConfig
from tests.embedding_cases import CASES, FOLDER, TEXT, options_of
from tests.embedding_cases import POOLINGS as RECORDED
from tests.engine.fakes import ScriptedRunner
from tests.joined_cases import for_each
from tests.tiny_models import TinyModelFactory

SMALL_CALLS = PrefillConfig(batch_size=64, chunk_size=32)
# llama.cpp prints 7 digits; its GELU goes through a table.
WITH_GELU = (
    "gemma3_mean",
    "gpt2",
    "gemma-embedding",
    "gemma-embedding_plain",
    "bert",
    "bert_unigram",
    "jina-bert-v2",
    "jina-bert-v2_norms",
    "jina-bert-v2_plain",
    "jina-bert-v3",
    "nomic-bert-moe",
    "modern-bert",
)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0", n_layers=2, context_length=512)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, attention_precision="f32", prefill=SMALL_CALLS) as llm:
        yield llm


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def test_every_case_is_recorded() -> None:
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(CASES)
    assert set(json.loads((FOLDER / "versions.json").read_text())) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_llama_cpp(tiny_model: TinyModelFactory, case: str) -> None:
    with np.load(FOLDER / f"{case}.npz") as golden:
        expected = dict(golden)
    with LLM(
        tiny_model(**options_of(case)),
        cache_type="f32",
        attention_precision="f32",
        prefill=SMALL_CALLS,
    ) as llm:
        for pooling in RECORDED:
            asked = None if pooling == "default" else pooling
            found = np.atleast_2d(llm.embed(TEXT, asked, normalize=False))
            assert found.shape == expected[pooling].shape
            np.testing.assert_allclose(
                found, expected[pooling], rtol=1e-4, atol=4e-3 if case in WITH_GELU else 1e-4
            )


@for_each("length", [1, 31, 64, 65, 200])
def test_pooling_is_that_of_float64(llm: LLM, length: int) -> None:
    """Whatever the calls are that read the text."""
    ids = tokens_of(length)
    rows = llm.embed(ids, "none", normalize=False)
    assert rows.shape == (length, llm.config.model_dim) and rows.dtype == np.float32
    exact = rows.astype(np.float64)
    oracle = {"mean": exact.mean(axis=0), "last": exact[-1], "cls": exact[0]}
    for pooling, expected in oracle.items():
        found = llm.embed(ids, pooling, normalize=False)
        assert found.shape == (llm.config.model_dim,) and found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        unit = llm.embed(ids, pooling)
        np.testing.assert_allclose(unit, found / np.linalg.norm(found.astype(float)), rtol=1e-6)


@for_each("power", [-1, 0, 1, 2, 3, 64])
def test_norms_are_those_of_llama_cpp(power: int) -> None:
    rows = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    rows[1] = 0
    rows[2] *= 1e30  # whose powers are beyond float64
    found = normalise(rows, power)
    exact = rows.astype(np.float64)
    for row, got in zip(exact[::2], found[::2], strict=True):
        unit = row / np.abs(row).max()
        norm = {-1: 1.0, 0: 1 / 32760}.get(power)
        if norm is None:
            norm = float((np.abs(unit) ** power).sum() ** (1 / power))
        expected = row if power == -1 else unit / norm
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(found[1], rows[1])


def test_several_texts_are_as_each_alone(llm: LLM) -> None:
    """Longer and shorter ones, texts and token ids, in the order in which they were given."""
    texts = ["the thing", tokens_of(130), "all that is there, and more of it", tuple(tokens_of(9))]
    found = llm.embed(texts, "mean")
    assert found.shape == (4, llm.config.model_dim)
    for row, text in zip(found, texts, strict=True):
        np.testing.assert_array_equal(row, llm.embed(text, "mean"))
    matrix = np.array([tokens_of(20), tokens_of(20, 1)])
    assert llm.embed(matrix, "last").shape == (2, llm.config.model_dim)
    assert llm.embed([tokens_of(5)], "last").shape == (1, llm.config.model_dim)
    assert llm.embed(np.array(tokens_of(5)), "last").shape == (llm.config.model_dim,)


def test_threads_change_nothing(model: Path) -> None:
    found = []
    for threads in (1, 2, 3):
        rule = H2OConfig(local=12, heavy=12)
        with LLM(model, threads=threads, attention=rule, prefill=SMALL_CALLS) as llm:
            found.append([llm.embed(tokens_of(200), pooling) for pooling in POOLINGS])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_prompts_are_read_by_the_rule_of_the_model(model: Path) -> None:
    """The last row is what the answer's first token is drawn by: as sparse, not as dense."""
    ids = tokens_of(300)
    vectors = []
    for attention in (H2OConfig(local=12, heavy=12), DenseConfig()):
        with LLM(model, attention=attention, prefill=SMALL_CALLS) as llm:
            vectors.append(llm.embed(ids, "last", normalize=False))
            runner = llm.start_runner(len(ids))
            for first in range(0, len(ids), 64):
                tokens = np.array(ids[first : first + 64], np.int32)
                logits = runner.prefill(tokens, is_last=first + 64 >= len(ids))
            expected = llm.model.dequantize("token_embd.weight") @ vectors[-1]
            assert logits is not None
            np.testing.assert_allclose(logits, expected, atol=0.02 * np.abs(logits).max())
    difference = np.linalg.norm(vectors[0] - vectors[1]) / np.linalg.norm(vectors[1])
    assert difference > 0.05


def test_answers_are_the_same_after_vectors(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = llm.generate("the thing is", greedy).token_ids
    kept = llm.stream(tokens_of(100), greedy, keep_cache=True)
    next(kept)
    vector = llm.embed("the thing is", "mean")
    with pytest.raises(UsageError, match="ended by a newer prompt"):
        next(kept)
    assert not llm.has_open_prompt
    again = llm.generate(tokens_of(100), greedy, keep_cache=True)
    assert again.stats.cached_tokens == 0
    assert llm.generate("the thing is", greedy).token_ids == before
    np.testing.assert_array_equal(llm.embed("the thing is", "mean"), vector)


def test_a_file_says_how_vectors_are_made(tiny_model: TinyModelFactory, model: Path) -> None:
    for number, name in enumerate(("none", "mean", "cls", "last")):
        with LLM(tiny_model(n_layers=1, pooling_type=number)) as llm:
            assert choose_pooling(llm.config, None) == name
            np.testing.assert_array_equal(llm.embed(TEXT), llm.embed(TEXT, name))
    with LLM(model) as llm:
        assert llm.embed(TEXT).shape == (len(llm.tokenize(TEXT)), llm.config.model_dim)
    for number, cause in ((4, "is a reranking model"), (9, "has an unknown pooling")):
        with LLM(tiny_model(n_layers=1, pooling_type=number)) as llm:
            with pytest.raises(UsageError, match=f"{cause}.*'llama.pooling_type'.*mean, cls, last"):
                llm.embed(TEXT)
            assert llm.embed(TEXT, "mean").shape == (llm.config.model_dim,)
            assert llm.generate("a", SamplingParams(max_tokens=1)).token_ids  # it writes as ever


def test_what_has_no_vector_is_refused(llm: LLM) -> None:
    for given, pooling, message in (
        ("", "mean", "the prompt is empty"),
        ([], "mean", "there is nothing to embed"),
        ((), None, "there is nothing to embed"),
        ([""], "mean", "the prompt is empty"),
        (5, "mean", "a prompt is text or a flat sequence"),
        (["a", 5], "mean", "a prompt is text or a flat sequence"),
        ([1, 2, 10**6], "mean", "outside the vocabulary"),
        ("a", "max", "pooling 'max' is unknown; there are none, mean, cls, last"),
        ("a", "rank", "pooling 'rank' makes no vectors: a model ranks by"),
        (["a", "b"], "none", "'none' gives a row for every token"),
    ):
        with pytest.raises(UsageError, match=message):
            llm.embed(given, pooling)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="normalize"):
        llm.embed("a", "mean", 2)  # type: ignore[arg-type]
    for pooling in ("mean", "last"):
        with pytest.raises(ContextLengthError, match="the prompt has 600 tokens"):
            llm.embed(tokens_of(600), pooling)
    assert llm.embed("a", "mean").shape == (llm.config.model_dim,)


def test_other_runners_have_no_vectors() -> None:
    """Of ONNX models logits alone are known; a GPU's sequence gives no hidden rows."""
    onnx = ModelConfig(
        architecture="x",
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=8,
        vocab_size=9,
        context_length=64,
        attention_scale=1.0,
    )
    with pytest.raises(UsageError, match="of an ONNX model only logits are known"):
        choose_pooling(onnx, "mean")
    with pytest.raises(UsageError, match="on the CPU"):
        require_rows(ScriptedRunner.__new__(ScriptedRunner))


def test_the_first_token_alone_is_read_where_nothing_else_counts(llm: LLM) -> None:
    np.testing.assert_array_equal(
        llm.embed(tokens_of(600), "cls"), llm.embed(tokens_of(600)[:1], "cls")
    )


def test_numbers_that_are_not_finite_are_an_error(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    from tests.tiny_models import with_vectors

    norm = np.full(256, np.nan, np.float32)
    path = with_vectors(tiny_model(n_layers=1), tmp_path / "x.gguf", {"output_norm.weight": norm})
    with LLM(path) as llm, pytest.raises(EdgeH2OError, match="not finite; the model file may be"):
        llm.embed("a b", "mean")


def test_other_models_that_look_ahead_are_refused(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    import gguf

    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "t5encoder")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        FormatError,
        match="a bias by distance that is learnt; for vectors of texts give such as bge-m3",
    ):
        LLM(path)
