"""Streams of events whose connection fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edgeh2o.serving.event_stream import EventStream
from edgeh2o.serving.openai_format import ChatFormat


@pytest.mark.parametrize("what", ["http.response.start", "http.response.body"])
def test_whatever_fails_the_request_is_ended(what: str) -> None:
    """It went on to be answered, for nobody."""
    ended: list[bool] = []

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "a"}

    async def send(message: Any) -> None:
        if message["type"] == what:
            raise RuntimeError("the connection is broken")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def end() -> None:
        ended.append(True)

    stream = EventStream(ChatFormat("m"), chunks(), end)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(stream({"type": "http"}, receive, send))
    assert ended == [True]
