"""Runs the application until a signal ends it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from ..errors import ResourceError
from .app import DRAIN_S

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_CONNECTIONS = 256
KEEP_ALIVE_S = 20
MAX_HEADER_BYTES = 32 * 2**10


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises ResourceError if it cannot be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(128)
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another "
            "one by --host and --port"
        ) from None
    return opened


def run_server(
    app: Starlette, listening: socket.socket, *, on_ready: Callable[[], None] | None = None
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
        http="h11",  # the strict one: httptools takes malformed headers
        ws="none",
        server_header=False,
        date_header=False,
    )
    server = _Server(config, on_ready)
    server.run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()
