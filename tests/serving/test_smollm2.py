"""The default model behind the server, once: it answers, goes on from a document, keeps a form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from tests.serving.conftest import StartServer


def test_a_real_model_answers(start_server: StartServer, smollm2_path: Path) -> None:
    server = start_server("--temp", "0", model=smollm2_path)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(text: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model="m", messages=messages, max_tokens=40, temperature=0, **options
        )

    document = "Paris is the capital of France. Berlin is the capital of Germany. " * 40
    first = ask(f"{document}\nWhat is the capital of France?")
    assert "Paris" in first.choices[0].message.content
    second = ask(f"{document}\nWhat is the capital of Germany?")
    assert "Berlin" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 400
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    made = ask("What is the capital of France? Answer as JSON.", response_format=form)
    assert json.loads(made.choices[0].message.content)["capital"]
    assert server.stop() == 0
