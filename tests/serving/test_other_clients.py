"""Clients besides openai-python: plain curl, and frameworks where they are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.serving.conftest import RunningServer

BODY = {
    "model": "any",
    "messages": [{"role": "user", "content": "the hen is in the pen"}],
    "max_tokens": 5,
    "seed": 1,
}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: RunningServer) -> None:
    def post(path: str, body: dict[str, Any], *flags: str) -> str:
        command = ["curl", "-sS", "--max-time", "30", *flags, f"{server.url}{path}"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    whole = json.loads(post("/v1/chat/completions", BODY))
    assert whole["object"] == "chat.completion" and whole["usage"]["completion_tokens"] == 5
    stream = post("/v1/chat/completions", BODY | {"stream": True}, "-N")
    lines = [line for line in stream.split("\n\n") if line.startswith("data: ")]
    assert stream.endswith("\n\n") and lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
    )
    assert text == whole["choices"][0]["message"]["content"]
    status = post("/v1/embeddings", BODY, "-o", "/dev/null", "-w", "%{http_code}")
    assert status == "501"


def test_langchain(server: RunningServer) -> None:
    openai = pytest.importorskip("langchain_openai")
    model = openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="m", max_tokens=5)
    said = model.invoke("the hen is in the pen")
    assert said.usage_metadata["output_tokens"] == 5
    assert len(list(model.stream("the hen is in the pen"))) > 1


def test_litellm(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    made = litellm.completion(
        **(BODY | {"model": "openai/m"}), api_base=f"{server.url}/v1", api_key="none"
    )
    assert made.usage.completion_tokens == 5
