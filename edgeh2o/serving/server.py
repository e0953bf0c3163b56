"""Runs the application until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from .app import DRAIN_S
from .timed_protocol import TimedProtocol

if TYPE_CHECKING:
    from types import FrameType

    from starlette.applications import Starlette

MAX_CONNECTIONS = 256
KEEP_ALIVE_S = 20
_TOLD_S = 2.0  # in which requests that are given up end
MAX_HEADER_BYTES = 32 * 2**10


def run_server(
    app: Starlette,
    listening: Sequence[socket.socket],
    *,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; requests in progress may then take ``DRAIN_S`` seconds."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(DRAIN_S) + 15,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=TimedProtocol,  # h11 is the strict one: httptools takes malformed headers
        ws="none",
        server_header=False,
        date_header=False,
    )
    server = _Server(config, on_ready, app.state.drain, app.state.give_up_saving)
    server.run(sockets=list(listening))


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None] | None,
        drain: Callable[[], Awaitable[None]],
        give_up_saving: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_ready, self._drain = on_ready, drain
        self._give_up_saving = give_up_saving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As the base; Ctrl-C while conversations go to the disk has none wait for that."""
        super().handle_exit(sig, frame)
        if sig == signal.SIGINT:
            self._give_up_saving()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the base, but what ended the server well does not kill the process at its end."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As the base, which waits for requests; they are told from the beginning on.

        A second Ctrl-C gives them up. What they leave behind is saved all the same, until another
        Ctrl-C ends that.
        """
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets=sockets)
        if not self.force_exit:
            await draining
            return
        draining.cancel()
        with suppress(asyncio.CancelledError):
            await draining
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_TOLD_S)
        await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()
