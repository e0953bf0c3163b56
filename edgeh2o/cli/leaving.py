"""How a command ends that the system or a closed terminal ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a terminal that is closed, exit from the block in good order.

    Python lets only the main thread set handlers.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [
        number
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
        if is_main and signal.getsignal(number) == signal.SIG_DFL  # nohup ignores SIGHUP
    ]
    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
