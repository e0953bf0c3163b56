"""Vectors over HTTP: openai-python, the paths of llama-server, and who is beside them."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import openai
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.serving.api_error import PromptTooLongError
from edgeh2o.serving.prompt_vectors import embed_prompts
from edgeh2o.serving.scheduler import CancelledError
from edgeh2o.serving.ticket import Ticket
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import SMALL_CALLS, RunningServer, StartServer, open_engine
from tests.serving.fetching import Reply, ask, fetch
from tests.tiny_models import TinyModelFactory

TEXTS = ["the thing is there", "all that", "and it is the thing for all"]
Rows = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def pooled(start_server: StartServer) -> RunningServer:
    return start_server(*SMALL_CALLS, "--pooling", "mean")


@pytest.fixture(scope="module")
def vectors(serving_model: Path) -> Rows:
    """Those of the texts, by the Python interface."""
    prefill = PrefillConfig(batch_size=256, chunk_size=64)
    with LLM(serving_model, prefill=prefill) as llm:
        return llm.embed(TEXTS, "mean")


def post(server: RunningServer, path: str, **body: Any) -> Reply:
    return fetch(server, path, json.dumps(body).encode(), {"content-type": "application/json"})


def test_openai_python_gets_vectors(pooled: RunningServer, vectors: Rows) -> None:
    """In floats and, as it asks by itself, in base64."""
    client = openai.OpenAI(base_url=f"{pooled.url}/v1", api_key="none", max_retries=0)
    for options in ({}, {"encoding_format": "float"}):
        made = client.embeddings.create(model="any", input=TEXTS, **options)
        assert (made.object, made.model) == ("list", "any")
        assert [each.index for each in made.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in made.data], vectors, atol=1e-6)
        assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    one = client.embeddings.create(model="any", input=TEXTS[0])
    np.testing.assert_allclose(one.data[0].embedding, vectors[0], atol=1e-6)
    ids = client.embeddings.create(model="any", input=[[5, 6, 7], [8, 9]])
    assert len(ids.data) == 2 and ids.usage.prompt_tokens == 5
    same = client.embeddings.create(model="any", input=[5, 6, 7])
    assert same.data[0].embedding == ids.data[0].embedding
    with pytest.raises(openai.BadRequestError, match="'dimensions' must be 256"):
        client.embeddings.create(model="any", input="a", dimensions=64)
    assert client.embeddings.create(model="any", input="a", dimensions=256).data


def test_answers_have_the_fields_of_llama_server(pooled: RunningServer, vectors: Rows) -> None:
    """As a llama-server of the same file answered, field by field."""
    said = ask(pooled, "/v1/embeddings", {"input": TEXTS[:2]})
    assert list(said) == ["model", "object", "usage", "data"]
    assert [list(each) for each in said["data"]] == [["embedding", "index", "object"]] * 2
    coded = ask(pooled, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    (data,) = coded["data"]
    assert data["object"] == "embedding" and data["encoding_format"] == "base64"
    numbers = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    np.testing.assert_allclose(numbers, vectors[0], atol=1e-6)
    for path, name in (
        *(("/embedding", "content"), ("/embeddings", "input"), ("/embeddings", "content")),
        ("/v1/embeddings", "content"),  # which makes the answer llama-server's own
    ):
        (bare,) = ask(pooled, path, {name: TEXTS[0]})
        assert list(bare) == ["index", "embedding"] and bare["index"] == 0
        np.testing.assert_allclose(bare["embedding"], vectors[:1], atol=1e-6)
    plain, largest = (
        np.array(ask(pooled, "/embedding", {"content": "a", "embd_normalize": n})[0]["embedding"])
        for n in (-1, 0)
    )
    np.testing.assert_allclose(largest, plain / np.abs(plain).max() * 32760, rtol=1e-5)
    mixed = ask(pooled, "/embedding", {"content": ["a", [5, "the", 6]]})
    assert [each["index"] for each in mixed] == [0, 1]


def test_without_pooling_tokens_have_rows(server: RunningServer, serving_model: Path) -> None:
    """As they are; OpenAI's interface has no form for them."""
    with LLM(serving_model, prefill=PrefillConfig(batch_size=256, chunk_size=64)) as llm:
        rows = llm.embed(TEXTS[0], "none", normalize=False)
    (said,) = ask(server, "/embeddings", {"input": TEXTS[0]})
    np.testing.assert_allclose(said["embedding"], rows, atol=1e-5)
    refused = post(server, "/v1/embeddings", input="a")
    assert refused.status_code == 400 and "--pooling mean" in refused.json()["error"]["message"]
    many = post(server, "/embeddings", input=[tokens_of(6000, 1)] * 3)
    assert many.status_code == 400 and "more than 4194304 numbers" in many.text


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "'input' or 'content' must be given"),
        ({"input": ""}, 400, "'input' must not be empty"),
        ({"input": []}, 400, "'input' must not be empty"),
        ({"input": ["a", ""]}, 400, "'input' must not be empty"),
        ({"input": 5}, 400, "'input' must be one text"),
        ({"input": [[1, -1]]}, 400, "outside the vocabulary"),
        ({"input": [[1, 10**6]]}, 400, "outside the vocabulary"),
        ({"input": [["a", 1.5]]}, 400, "'input' must be one text"),
        ({"input": ["a"] * 2049}, 400, "more than 2048 prompts"),
        ({"input": "a", "encoding_format": "hex"}, 400, "'encoding_format' must be float or"),
        ({"input": "a", "embd_normalize": 65}, 400, "'embd_normalize' must be an integer from -1"),
        ({"input": "a", "dimensions": 0}, 400, "'dimensions' must be an integer from 1"),
        ({"input": "a", "lora": [{"id": 3, "scale": 1}]}, 400, "adapter"),
        ({"input": tokens_of(9000, 2)}, 400, "maximum context length is 8192 tokens"),
    ],
)
def test_bad_requests_are_refused(
    pooled: RunningServer, body: dict[str, Any], status: int, message: str
) -> None:
    for path in ("/v1/embeddings", "/embeddings"):
        reply = post(pooled, path, **body)
        assert (reply.status_code, message in reply.text) == (status, True), reply.text
        error = reply.json()["error"]
        assert (error["code"] == 400) == (path == "/embeddings")  # a number, as of llama-server
    assert post(pooled, "/v1/embeddings", input="a").status_code == 200


def test_requests_are_counted(pooled: RunningServer) -> None:
    def count(name: str) -> float:
        lines = fetch(pooled, "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    name, tokens = 'edgeh2o_requests_total{outcome="answered"}', "edgeh2o_prompt_tokens_total"
    before, n_tokens = count(name), count(tokens)
    said = ask(pooled, "/v1/embeddings", {"input": TEXTS})
    assert count(name) == before + 1
    assert count(tokens) == n_tokens + said["usage"]["prompt_tokens"]


def embed(engine: Any, prompts: list[list[int]], pooling: str, ticket: Ticket) -> list[Rows]:
    return embed_prompts(
        engine.pool,
        [np.array(ids, np.int32) for ids in prompts],
        pooling,
        adapter_scales=(),
        require=ticket.require,
    )


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_vectors_do_not_depend_on_what_is_beside_them(serving_model: Path, pooling: str) -> None:
    """Bit by bit: other texts of the request, other requests, answers; nor these on them."""
    prompts = [tokens_of(length, seed) for seed, length in enumerate((700, 5, 64, 1500, 2))]
    wanted = [request_of(tokens_of(300, 30 + i), 12) for i in range(3)]
    rule = {"attention": HeadwiseConfig(budget=64, local=16)}
    with open_engine(serving_model, **rule) as engine:
        alone = [embed(engine, [ids], pooling, Ticket())[0] for ids in prompts]
    with open_engine(serving_model, **rule) as engine:
        answers = [answer(engine, request) for request in wanted]
    with open_engine(serving_model, **rule) as engine, ThreadPoolExecutor(6) as threads:
        together = [threads.submit(embed, engine, prompts, pooling, Ticket()) for _ in range(2)]
        beside = list(threads.map(lambda request: answer(engine, request), wanted))
        for found in (each.result() for each in together):
            for one, other in zip(found, alone, strict=True):
                np.testing.assert_array_equal(one, other)
        assert all(not each.is_busy for each in engine.pool.room.kept)
    assert [each.logprobs for each in beside] == [each.logprobs for each in answers]


def test_a_conversation_stays_when_vectors_are_made(serving_model: Path) -> None:
    document = tokens_of(900, 3)
    with open_engine(serving_model) as engine:
        answer(engine, request_of(document))
        embed(engine, [tokens_of(400, 4), tokens_of(20, 5)], "mean", Ticket())
        assert len(engine.pool) == 1  # what was reserved is given back
        again = answer(engine, request_of(document + tokens_of(20, 6)))
        assert again.stats.cached_tokens > 800


def test_who_is_cancelled_stops_between_two_layers(serving_model: Path) -> None:
    ticket, is_reading = Ticket(), Event()

    def require() -> None:
        is_reading.set()
        ticket.require()

    with open_engine(serving_model) as engine, ThreadPoolExecutor(1) as threads:
        ids = np.array(tokens_of(4000, 7), np.int32)
        work = threads.submit(
            embed_prompts, engine.pool, [ids], "mean", adapter_scales=(), require=require
        )
        assert is_reading.wait(30)
        ticket.cancel("nobody waits")
        with pytest.raises(CancelledError, match="nobody waits"):
            work.result(30)
        assert len(engine.pool) == 0
        assert len(embed(engine, [tokens_of(5, 8)], "mean", Ticket())) == 1


def test_what_does_not_fit_is_refused(serving_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(serving_model) as engine:
        with pytest.raises(PromptTooLongError):
            embed(engine, [tokens_of(8193, 1)], "cls", Ticket())
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 70 * 2**20)
            with pytest.raises(ResourceError, match="are available"):
                embed(engine, [tokens_of(8000, 1)], "mean", Ticket())
        assert len(engine.pool) == 0
        assert len(embed(engine, [tokens_of(5, 8)], "mean", Ticket())) == 1


def test_a_request_ends_when_its_time_is_up_or_its_client_goes(start_server: StartServer) -> None:
    """The place is free for others at once."""
    server = start_server(*SMALL_CALLS, "--pooling", "mean", "--timeout", "2", "--parallel", "1")
    texts = [tokens_of(8000, seed) for seed in range(24)]
    late = post(server, "/v1/embeddings", input=texts)
    assert late.status_code == 503 and "longer than 2 seconds" in late.text
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"input": texts}).encode()
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    connection.close()
    assert post(server, "/v1/embeddings", input="a").status_code == 200
    assert server.stop() == 0


def test_models_that_write_none(start_server: StartServer, tiny_model: TinyModelFactory) -> None:
    """Vectors are those of Python; requests for texts say what to ask for, and the server stays."""
    model = tiny_model(
        architecture="gemma-embedding", n_layers=2, pooling_type=1, dense_dim=96, context_length=300
    )
    server = start_server(model=model)
    long = list(range(5, 300)) + [7] * 5
    with LLM(model) as llm:
        expected = llm.embed([*TEXTS, long])
    said = ask(server, "/v1/embeddings", {"input": [*TEXTS]})
    found = np.array([each["embedding"] for each in said["data"]])
    np.testing.assert_allclose(found, expected[:3], atol=1e-6)
    said = ask(server, "/v1/embeddings", {"input": [long]})
    np.testing.assert_allclose(said["data"][0]["embedding"], expected[3], atol=1e-6)
    reply = post(server, "/v1/embeddings", input=[[*long, 7]])
    assert reply.status_code == 400 and "301 tokens" in reply.text
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/completion", {"prompt": "a"}),
    ):
        reply = post(server, path, **body)
        assert "makes vectors of texts and writes none" in reply.text, path
        assert reply.status_code == 400, path
    assert ask(server, "/v1/embeddings", {"input": TEXTS[0]})["data"]
