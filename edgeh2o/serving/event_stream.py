"""Server-sent events that end when the client goes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EdgeH2OError
from .answer_format import AnswerFormat
from .api_error import as_api_error

_logger = logging.getLogger(__name__)

Chunks = AsyncIterator[Mapping[str, Any] | None]

# Proxies and clients give up on a connection that is silent for a minute or so.
HEARTBEAT_S = 10.0
# Between two heartbeats that stand for progress.
COMMENT_S = 1.0


class EventStream(Response):
    """Sends every chunk as an event, None as a heartbeat, and what ends a stream of ``form``.

    An error becomes events of its own. ``on_end`` is awaited whatever happens.
    """

    def __init__(
        self, form: AnswerFormat, chunks: Chunks, on_end: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._form, self._chunks, self._on_end = form, chunks, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_while_heard(receive, send)
        finally:
            await self._on_end()

    async def _send_while_heard(self, receive: Receive, send: Send) -> None:
        """Until all is sent, or the client goes."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        sending = asyncio.ensure_future(self._send_all(send))
        watching = asyncio.ensure_future(_wait_for_end(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            watching.cancel()
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send_all(self, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        form, loop = self._form, asyncio.get_running_loop()
        heartbeat = b": reading the prompt\n\n"
        if form.heartbeat is not None:
            heartbeat = encode_event(form.heartbeat, is_named=form.is_named)
        commented_at = 0.0
        try:
            async for chunk in _with_heartbeats(self._chunks):
                if chunk is not None:
                    await write(encode_event(chunk, is_named=form.is_named))
                elif loop.time() - commented_at >= COMMENT_S:
                    commented_at = loop.time()
                    await write(heartbeat)
        except Exception as error:
            if not isinstance(error, (EdgeH2OError, MemoryError)):
                _logger.error("a stream failed", exc_info=error)
            for chunk in form.fail(as_api_error(error)):
                await write(encode_event(chunk, is_named=form.is_named))
        await write(b"data: [DONE]\n\n" if form.is_done_said else b"", more=False)


async def _with_heartbeats(chunks: Chunks) -> Chunks:
    """``chunks``, and None whenever there was none for a while."""
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait({pending}, timeout=HEARTBEAT_S)
            if not done:
                yield None
                continue
            finished, pending = pending, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(value: Mapping[str, Any], *, is_named: bool = False) -> bytes:
    """One event of a stream, with its "type" as the name."""
    name = f"event: {value['type']}\n".encode() if is_named else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n\n"
