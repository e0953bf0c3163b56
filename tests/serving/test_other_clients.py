"""Clients besides openai-python: plain curl, LangChain, and litellm where it is installed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

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
    status = post("/v1/images/generations", BODY, "-o", "/dev/null", "-w", "%{http_code}")
    assert status == "501"


class Sum(BaseModel):
    """Adds two digits."""

    a: Literal[1, 2, 3]
    b: Literal[1, 2, 3]


def test_langchain(server: RunningServer) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    messages = [("system", "be brief"), ("user", "the hen is in the pen")]

    def chat_by(**clients: Any) -> Any:  # its own are never closed
        url = f"{server.url}/v1"
        return chat(
            base_url=url, api_key="none", model="m", temperature=0, max_retries=0, **clients
        )

    async def ask_again() -> str:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = chat_by(http_async_client=http).bind(max_tokens=5)
            return str((await model.ainvoke(messages)).content)

    with openai.DefaultHttpxClient() as http:
        model = chat_by(http_client=http)
        short = model.bind(max_tokens=5)
        said = short.invoke(messages)
        assert said.usage_metadata["output_tokens"] == 5
        chunks = list(short.stream(messages))
        assert len(chunks) > 1 and "".join(chunk.content for chunk in chunks) == said.content
        assert asyncio.run(ask_again()) == said.content
        made = model.with_structured_output(Sum, method="json_schema").invoke("one and two")
        assert isinstance(made, Sum)
        called = model.bind_tools([Sum], tool_choice="required").invoke("one and two")
        (call,) = called.tool_calls
        assert call["name"] == "Sum" and Sum(**call["args"])
        with pytest.raises(openai.BadRequestError) as refused:
            model.invoke("the hen " * 9000)
        assert refused.value.code == "context_length_exceeded"
        by_items = chat_by(http_client=http, use_responses_api=True)
        again = by_items.bind(max_output_tokens=5)
        assert again.invoke(messages).text == said.content
        assert "".join(chunk.text for chunk in again.stream(messages)) == said.content
        (call,) = by_items.bind_tools([Sum], tool_choice="required").invoke("one").tool_calls
        assert call["name"] == "Sum" and Sum(**call["args"])


def test_litellm(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    made = litellm.completion(
        **(BODY | {"model": "openai/m"}), api_base=f"{server.url}/v1", api_key="none"
    )
    assert made.usage.completion_tokens == 5
