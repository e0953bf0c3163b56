"""Says "not yet" on the sockets of a server whose model is still being loaded."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

from .api_error import ApiError

if TYPE_CHECKING:
    from typing_extensions import Self

RETRY_AFTER_S = 2
_PATIENCE_S = 1.0  # for one client: they are answered one after the other
_MOST_READ = 64 * 2**10


class LoadingNotice:
    """A context in which every request on listening sockets gets a 503, by a thread of its own.

    Health checks and clients then know that the server is there; without it they would wait in the
    queue of a socket, which takes their requests and says nothing. What is in a queue at the end is
    left to whoever serves the socket next.
    """

    def __init__(self, listening: Sequence[socket.socket]) -> None:
        self._listening = list(listening)
        self._ending, self._end = socket.socketpair()
        self._thread = Thread(target=self._run, name="edgeh2o-loading", daemon=True)

    def __enter__(self) -> Self:
        for each in self._listening:
            each.setblocking(False)  # a client may have gone when it is accepted
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.close()
        self._thread.join()
        self._ending.close()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._listening, self._ending], [], [])
            if self._ending in ready:
                return
            with suppress(OSError):  # of a client that has gone
                connection, _ = ready[0].accept()
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Reads what there is of a request first: else the client may see a reset instead."""
        end = monotonic() + _PATIENCE_S
        received = b""
        while b"\r\n\r\n" not in received and len(received) < _MOST_READ:
            part = _receive(connection, end)
            if not part:
                return
            received += part
        connection.sendall(_reply_to(received))
        connection.shutdown(socket.SHUT_WR)
        n_left = _MOST_READ
        while n_left > 0 and (part := _receive(connection, end)):
            n_left -= len(part)


def _reply_to(received: bytes) -> bytes:
    """The 503, in the form of the interface that is asked for."""
    error = ApiError(
        "the model is being loaded; try again soon",
        status=503,
        kind="server_error",
        code="loading",
    )
    target = received.partition(b"\r\n")[0].split(b" ")[1:2]
    path = b"".join(target).partition(b"?")[0].decode("latin-1")
    body = json.dumps(error.describe(path)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def _receive(connection: socket.socket, end: float) -> bytes:
    """What comes next, until a time of the monotonic clock. Raises TimeoutError then."""
    connection.settimeout(max(0.001, end - monotonic()))
    return connection.recv(_MOST_READ)
