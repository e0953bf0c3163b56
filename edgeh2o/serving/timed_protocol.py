"""HTTP connections whose requests have to arrive: those that never do hold places of others."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 20.0


class TimedProtocol(H11Protocol):
    """uvicorn's, but the headers of a request must have come a while after their first byte.

    The same holds for the first request of a connection from its beginning on. Between requests
    there is uvicorn's own limit.
    """

    _ending: asyncio.TimerHandle | None = None
    _has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._ending is None:
            self._ending = self.loop.call_later(HEADER_TIMEOUT_S, self._end)

    def _stop_waiting(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _end(self) -> None:
        if self.transport.is_closing():
            return
        if self._has_begun and self.conn.our_state is h11.IDLE:
            self.send_400_response("The headers came too slowly.")
        else:
            self.transport.close()
