"""What is left of work that was done."""

from __future__ import annotations

import gc
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
