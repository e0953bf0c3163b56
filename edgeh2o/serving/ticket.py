"""A request's right to go on."""

from __future__ import annotations

from threading import Lock

from .scheduler import CancelledError
from .shared_runner import SharedRunner


class Ticket:
    """A request's right to go on; any thread may take it back."""

    def __init__(self) -> None:
        self.place = -1  # at which it is answered
        self.n_generated = 0  # so far
        self.most_tokens = -1  # of the answer; -1: as many as there are
        self.is_answered = False
        self._lock = Lock()
        self._runner: SharedRunner | None = None
        self._reason: str | None = None

    def cancel(self, reason: str) -> None:
        """Ends the request with a CancelledError, between two layers at the latest."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            if self._runner is not None:
                self._runner.cancel(self._reason)

    def attach(self, runner: SharedRunner | None) -> None:
        """The runner that the request has from now on; None: it has none any more."""
        with self._lock:
            self._runner = runner
            if runner is not None and self._reason is not None:
                runner.cancel(self._reason)

    def require(self) -> None:
        """Raises the CancelledError of a request that was given up."""
        if self._reason is not None:
            raise CancelledError(self._reason)
