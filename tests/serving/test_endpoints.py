"""What clients and operators ask of a server besides answers."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection

import pytest

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import fetch

JSON = {"content-type": "application/json"}


def test_texts_become_tokens_and_come_back(server: RunningServer) -> None:
    text = "the hen is in the pen, ünïcode"
    body = json.dumps({"content": text}).encode()
    for prefix in ("", "/v1"):
        made = fetch(server, f"{prefix}/tokenize", body, JSON).json()
        assert made["count"] == len(made["tokens"]) > 5
        back = json.dumps({"tokens": made["tokens"]}).encode()
        assert fetch(server, f"{prefix}/detokenize", back, JSON).json() == {"content": text}
    body = json.dumps({"content": text, "with_pieces": True}).encode()
    pieces = fetch(server, "/tokenize", body, JSON).json()["tokens"]
    assert [piece["id"] for piece in pieces] == made["tokens"]
    spelt = [
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
    ]
    assert b"".join(spelt) == text.encode()
    assert any(isinstance(piece["piece"], list) for piece in pieces)  # of one character several
    bad = fetch(server, "/detokenize", b'{"tokens": ["x"]}', JSON)
    assert bad.status_code == 400 and "token ids" in bad.json()["error"]["message"]


def test_what_it_is(server: RunningServer) -> None:
    (model,) = fetch(server, "/v1/models").json()["data"]
    assert fetch(server, f"/v1/models/{model['id']}").json() == model
    assert fetch(server, "/v1/models/other").json()["error"]["code"] == "model_not_found"
    properties = fetch(server, "/props").json()
    assert properties["model"] == model["id"] and properties["parallel"] == 4
    assert properties["context_size"] == model["context_length"] == 8192
    # What clients of llama-server look for.
    assert properties["default_generation_settings"]["n_ctx"] == 8192
    assert (properties["total_slots"], properties["model_alias"]) == (4, model["id"])
    assert "tokens" in properties["attention"]["prompts"]
    assert properties["attention"]["generated_tokens"] == "read everything"
    assert bool(properties["chat_template"]) == properties["has_chat_template"]
    assert fetch(server, "/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["audio/transcriptions", "images/generations"])
def test_what_is_not_served_says_what_to_use(server: RunningServer, path: str) -> None:
    reply = fetch(server, f"/v1/{path}", b"{}", JSON)
    assert reply.status_code == 501
    assert reply.json()["error"]["code"] == "unsupported_endpoint"


def metric(text: str, name: str) -> float:
    found = re.search(rf"^edgeh2o_{name} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_metrics_count_what_was_done(start_server: StartServer) -> None:
    server = start_server("-ub", "64", "-b", "256")
    request = {"messages": [{"role": "user", "content": "the hen " * 200}], "max_tokens": 5}
    body = json.dumps(request | {"ignore_eos": True, "seed": 1}).encode()
    replies = [fetch(server, "/v1/chat/completions", body, JSON).json() for _ in range(2)]
    assert fetch(server, "/v1/chat/completions", b"{", JSON).status_code == 400
    text = fetch(server, "/metrics").text
    usages = [reply["usage"] for reply in replies]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 < cached[1]
    expected = {
        'requests_total{outcome="answered"}': 2,
        "prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "cached_tokens_total": sum(cached),
        "generated_tokens_total": 10,
        "time_to_first_token_seconds_count": 2,
        "decode_tokens_per_second_count": 2,
        "kept_conversations": 1,
        "requests_running": 0,
    }
    assert {name: metric(text, re.escape(name)) for name in expected} == expected
    assert metric(text, "peak_rss_bytes") > metric(text, "kept_conversation_bytes") > 0
    assert server.stop() == 0


def test_pages_of_the_named_origins_may_call_it(start_server: StartServer) -> None:
    names = ("--cors", "https://app.example,localhost", "--cors", "https://b.example")
    server = start_server(*names, "-b", "256", "-ub", "64")
    for origin, is_allowed in (
        ("https://app.example", True),
        ("https://b.example", True),
        ("https://evil.example", False),
        ("http://localhost:8080", True),
        ("http://[::1]:3000", True),
        ("https://127.0.0.1", True),
        ("http://localhost.evil.example", False),
        ("http://notlocalhost", False),
        ("http://localhost:80:80", False),
    ):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,authorization",
        }
        connection.request("OPTIONS", "/v1/chat/completions", headers=headers)
        reply = connection.getresponse()
        assert (reply.status == 200) == is_allowed
        allowed = reply.headers.get("Access-Control-Allow-Origin")
        assert allowed == (origin if is_allowed else None)
        connection.close()
    assert server.stop() == 0
