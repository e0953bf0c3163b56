"""Ranks of documents over HTTP, in the two forms of llama-server, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM
from tests.rank_cases import CASES, DOCUMENTS, FILE, QUERY
from tests.serving.conftest import SMALL_CALLS, RunningServer, StartServer
from tests.serving.fetching import Reply, ask, fetch
from tests.tiny_models import TinyModelFactory

PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
ASKED = {"query": QUERY, "documents": list(DOCUMENTS)}


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(**CASES["qwen3"], context_length=512)


@pytest.fixture(scope="module")
def ranking(start_server: StartServer, model: Path) -> RunningServer:
    return start_server(*SMALL_CALLS, "--reranking", model=model)


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Reply:
    return fetch(server, path, json.dumps(body).encode(), {"content-type": "application/json"})


def test_ranks_are_those_of_llama_cpp_and_python(ranking: RunningServer, model: Path) -> None:
    with LLM(model) as llm:
        scores = llm.rerank(QUERY, DOCUMENTS)
    best = np.argsort(-scores).tolist()
    for path in PATHS:
        said = ask(ranking, path, ASKED)
        assert list(said) == ["model", "object", "usage", "results"] and said["object"] == "list"
        assert said["usage"]["prompt_tokens"] == said["usage"]["total_tokens"] > 100
        assert [each["index"] for each in said["results"]] == best
        found = [each["relevance_score"] for each in said["results"]]
        np.testing.assert_allclose(found, scores[best], atol=1e-4)
    golden = np.array(json.loads(FILE.read_text())["qwen3"])[:, 0]
    np.testing.assert_allclose(found, golden[best], atol=2e-3)  # whose cache is of 32 bits
    assert ask(ranking, "/rerank", {**ASKED, "model": "any"})["model"] == "any"


def test_the_best_are_told_in_the_form_of_tei(ranking: RunningServer) -> None:
    texts = {"query": QUERY, "texts": list(DOCUMENTS)}
    full = ask(ranking, "/rerank", ASKED)["results"]
    said = ask(ranking, "/rerank", texts)
    assert [list(each) for each in said] == [["index", "score"]] * 4
    assert [each["score"] for each in said] == [each["relevance_score"] for each in full]
    two = ask(ranking, "/rerank", {**texts, "top_n": 2, "return_text": True})
    assert [each["text"] for each in two] == [DOCUMENTS[each["index"]] for each in full[:2]]
    assert ask(ranking, "/v1/rerank", {**ASKED, "top_n": 1})["results"] == full[:1]
    assert ask(ranking, "/v1/rerank", {**ASKED, "top_n": 99})["results"] == full


def test_pairs_are_ranked_by_logits(
    start_server: StartServer, tiny_model: TinyModelFactory
) -> None:
    """Of a model whose tokens read those behind them too."""
    server = start_server(model=tiny_model(**CASES["bert_unigram"]))
    golden = np.ravel(json.loads(FILE.read_text())["bert_unigram"])
    said = ask(server, "/v1/rerank", ASKED)["results"]
    assert [each["index"] for each in said] == np.argsort(-golden).tolist()
    found = [each["relevance_score"] for each in said]
    np.testing.assert_allclose(found, np.sort(golden)[::-1], atol=1e-2)
    assert found[-1] < 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'query' must be a string"),
        ({"query": 5, "documents": ["a"]}, "'query' must be a string"),
        ({"query": "a"}, "must be an array of 1 to 2048 strings"),
        ({"query": "a", "documents": []}, "'documents' must be an array of 1 to 2048 strings"),
        ({"query": "a", "documents": "b"}, "'documents' must be an array"),
        ({"query": "a", "texts": ["b", 5]}, "'texts' must be an array"),
        ({"query": "a", "documents": ["b"] * 2049}, "1 to 2048 strings"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "'top_n' must be an integer from 0"),
        ({"query": "a", "documents": ["the thing " * 600]}, "maximum context length is 512"),
        ({"query": "a", "documents": ["b"], "lora": [{"id": 3, "scale": 1}]}, "adapter"),
    ],
)
def test_bad_requests_are_refused(
    ranking: RunningServer, body: dict[str, Any], message: str
) -> None:
    for path in ("/v1/rerank", "/rerank"):
        reply = post(ranking, path, body)
        assert (reply.status_code, message in reply.text) == (400, True), reply.text
    assert post(ranking, "/v1/rerank", ASKED).status_code == 200


def test_other_models_say_what_to_use(server: RunningServer, ranking: RunningServer) -> None:
    for path in PATHS:
        reply = post(server, path, ASKED)
        assert reply.status_code == 501 and "Qwen3-Reranker" in reply.json()["error"]["message"]
    reply = post(ranking, "/v1/embeddings", {"input": "a"})
    assert reply.status_code == 400 and "is a reranking model" in reply.text
