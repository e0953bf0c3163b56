"""Plain HTTP, as no client library would send it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from tests.serving.conftest import RunningServer


@dataclass(frozen=True)
class Reply:
    """A whole answer; names of headers in lower case."""

    status_code: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def fetch(
    server: RunningServer,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """POST with a body, GET without."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        method = "GET" if body is None else "POST"
        with suppress(BrokenPipeError):  # refused before the end of the body
            connection.request(method, path, body, dict(headers or {}))
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, found, reply.read().decode())
    finally:
        connection.close()


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    """The object of an answer to a ``POST``, those of its events if it streams."""
    reply = fetch(server, path, json.dumps(body).encode(), {"content-type": "application/json"})
    if not body.get("stream"):
        return reply.json()
    events = [line.removeprefix("data: ") for line in reply.text.split("\n") if "data: " in line]
    return [json.loads(event) for event in events]
