"""Files of requests and of results, and the command between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCUMENT = "the thing is that the art is there and the hen is in the pen " * 20


def request(number: int, n_tokens: int = 8, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{DOCUMENT} what is {number}?"}]
    body = {"messages": messages, "max_tokens": n_tokens, "seed": number} | body
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def write(path: Path, requests: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return str(path)


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


def command(model: Path, source: str, target: Path) -> list[str]:
    sizes = ["-ub", "64", "-b", "256", "-t", "1"]
    return ["batch", str(model), source, "-o", str(target), "--quiet", *sizes]
