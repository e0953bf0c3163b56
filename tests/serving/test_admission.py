"""What is left of a request that failed."""

from __future__ import annotations

import gc
import weakref

import pytest

from edgeh2o.serving.admission import forget_frames


class Runner:
    """What holds much memory."""


@pytest.mark.parametrize("is_chained", [False, True])
def test_an_error_keeps_nothing_of_the_frames_that_it_came_through(is_chained: bool) -> None:
    runners: list[weakref.ref[Runner]] = []

    def fail() -> None:
        runner = Runner()
        runners.append(weakref.ref(runner))
        error = ValueError("of the runner")  # a variable of the frame that it holds
        raise error

    gc.disable()
    try:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            try:
                fail()
            except ValueError as error:
                if not is_chained:
                    raise
                raise RuntimeError("of the request") from error
        assert runners[0]() is not None
        forget_frames(caught.value)
        assert runners[0]() is None
    finally:
        gc.enable()
