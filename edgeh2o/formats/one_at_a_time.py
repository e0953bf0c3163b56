"""Work that one process does for others: they wait for it, within limits, or do it themselves."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Seconds between two looks of whoever waits.
POLL_S = 0.05


@contextmanager
def one_at_a_time(lock: Path, seconds: float, is_done: Callable[[], bool]) -> Iterator[None]:
    """Waits until ``lock`` is free and holds it, until ``is_done()``, or for so many ``seconds``.

    The file is made for that, and removed at the end. Whoever holds it loses it with the process.
    Nothing depends on it: where it cannot be made or locked, nobody is waited for.
    """
    end, held = time.monotonic() + seconds, None
    try:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            while (held := _try_lock(lock)) is None and not is_done():
                if time.monotonic() > end:
                    break
                time.sleep(POLL_S)
        yield
    finally:
        if held is not None:
            with suppress(OSError):
                lock.unlink()  # who has opened it meanwhile finds that the work is done
            os.close(held)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, None while another one does. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
