"""What is left of work that was done."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np

from edgeh2o.serving.scheduler import Scheduler


class Runner:
    """Decodes one token."""

    def decode(self, token: int) -> Any:
        return np.full(4, token, np.float32)


def test_a_step_that_is_over_holds_no_runner() -> None:
    """Memory of a sequence is not what Python's collector of cycles goes by."""
    scheduler, runner = Scheduler(), Runner()
    gc.disable()
    try:
        logits = scheduler.decode(runner, np.array([3], np.int32), None)
        np.testing.assert_array_equal(logits, [[3, 3, 3, 3]])
        assert scheduler.call(lambda: 5) == 5  # the thread has let go of the step
        left = weakref.ref(runner)
        scheduler.leave(runner)
        del runner
        assert left() is None
    finally:
        gc.enable()
        scheduler.close()


def test_the_last_step_holds_no_runner_while_nothing_else_comes() -> None:
    """A server at rest held all of its last conversation, dropped or not."""
    scheduler, runner = Scheduler(), Runner()
    left = weakref.ref(runner)
    scheduler.decode(runner, np.array([3], np.int32), None)
    scheduler.leave(runner)
    del runner
    for _ in range(100):  # until the thread waits again
        if left() is None:
            break
        time.sleep(0.05)
    assert left() is None
    scheduler.close()
