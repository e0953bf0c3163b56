"""One thread that calls the core for all requests: decodes together, prefill calls by turns."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..errors import EdgeH2OError
from .step_costs import StepCosts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core

T = TypeVar("T")

# Decode steps of all running answers between two calls of prefill.
DECODES_PER_PREFILL = 4
# How long a step waits for answers whose last token is being drawn, so that they share it.
GATHER_S = 0.004


class CancelledError(EdgeH2OError):
    """The request ended before its answer: its client went, its time is up, the server stops."""


class _Job(ABC, Generic[T]):
    """Work that another thread waits for."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def run(self) -> T:
        """Does it."""

    def execute(self) -> None:
        try:
            self.finish(self.run())
        except BaseException as error:
            self.fail(error)

    def finish(self, result: T) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> T:
        self._done.wait()
        error, self._error = self._error, None
        if error is None:
            return self._result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame, and by it the caller's runner


class _CallJob(_Job[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def run(self) -> T:
        return self._call()


class _DecodeJob(_Job["NDArray[np.float32]"]):
    """A token to append to a sequence of a workspace, and guesses; or to any runner without one."""

    def __init__(
        self, runner: Any, tokens: NDArray[np.int32], workspace: _core.Workspace | None
    ) -> None:
        super().__init__()
        self.runner, self.tokens, self.workspace = runner, tokens, workspace

    def run(self) -> NDArray[np.float32]:
        """By itself."""
        if len(self.tokens) > 1:
            rows: NDArray[np.float32] = self.runner.decode_batch(self.tokens)
            return rows
        logits: NDArray[np.float32] = self.runner.decode(int(self.tokens[0]))
        return logits[None]


class Scheduler:
    """Takes calls of any number of threads and runs them in one thread of its own.

    Decode steps that wait at the same time become one pass over the weights, with the guesses of
    each; what comes out for a sequence does not depend on the others. ``costs`` are those of such
    steps. Between two calls of prefill, which take turns, there
    are up to ``DECODES_PER_PREFILL`` such steps.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._calls: deque[_Job[Any]] = deque()
        self._decodes: list[_DecodeJob] = []
        self._decoding: set[int] = set()  # ids of runners whose next step is expected
        self._n_reading = 0  # prompts that are being read, in several calls each
        self._n_decodes_since_call = 0
        self._last_step_at = 0.0
        self.costs = StepCosts()
        self._is_closed = False
        self.n_steps = self.n_step_rows = 0  # for statistics: passes over the weights, tokens
        self._thread = Thread(target=self._loop, name="edgeh2o-scheduler", daemon=True)
        self._thread.start()

    def call(self, run: Callable[[], T], *, is_next: bool = False) -> T:
        """Runs ``run`` when its turn comes and returns its result, or raises what it raises.

        One that ``is_next`` goes before the others that wait.
        """
        job = _CallJob(run)
        with self._changed:
            self._require_open()
            if is_next:
                self._calls.appendleft(job)
            else:
                self._calls.append(job)
            self._changed.notify()
        return job.wait()

    def decode(
        self, runner: Any, tokens: NDArray[np.int32], workspace: _core.Workspace | None
    ) -> NDArray[np.float32]:
        """Logits [n, vocab_size] after each of ``tokens``.

        The first is appended, and the others are looked at, as ``BatchRunner.decode_batch`` does.
        ``leave`` says that no more steps will come.
        """
        job = _DecodeJob(runner, tokens, workspace)
        with self._changed:
            self._require_open()
            self._decoding.add(id(runner))
            self._decodes.append(job)
            self._changed.notify()
        return job.wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A prompt is read meanwhile."""
        with self._changed:
            self._n_reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_reading -= 1

    @property
    def is_quiet(self) -> bool:
        """Whether no prompt is being read and no more than one answer is being written."""
        with self._changed:
            return self._n_reading == 0 and len(self._decoding) <= 1

    def leave(self, runner: Any) -> None:
        """Steps need not wait for ``runner`` any more."""
        with self._changed:
            self._decoding.discard(id(runner))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; calls that wait get a CancelledError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _require_open(self) -> None:
        if self._is_closed:
            raise CancelledError("the server is shutting down")

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._calls or self._decodes or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    for job in (*self._calls, *self._decodes):
                        job.fail(CancelledError("the server is shutting down"))
                    return
                steps, call = self._choose()
            if steps:
                self.n_steps += _decode_together(steps, self.costs)
                self.n_step_rows += len(steps)
                self._last_step_at = time.monotonic()
            elif call is not None:
                call.execute()
                self._last_step_at = 0.0  # those that decode had time to draw their tokens
            steps, call = [], None  # they hold a runner, which may be gone before the next is there

    def _choose(self) -> tuple[list[_DecodeJob], _Job[Any] | None]:
        """What is next; may wait for steps that are about to come."""
        is_calls_turn = self._n_decodes_since_call >= DECODES_PER_PREFILL or not self._decodes
        if self._calls and is_calls_turn:
            self._n_decodes_since_call = 0
            return [], self._calls.popleft()
        end = self._last_step_at + GATHER_S
        while len(self._decodes) < len(self._decoding) and not self._is_closed:
            left = end - time.monotonic()
            if left <= 0:
                break
            self._changed.wait(left)
        steps, self._decodes = self._decodes, []
        self._n_decodes_since_call += 1
        return steps, None


def _decode_together(jobs: list[_DecodeJob], costs: StepCosts) -> int:
    """One pass for all that share a workspace; one by one for others. The number of passes."""
    n_passes = 0
    groups: dict[int, list[_DecodeJob]] = {}
    for job in jobs:
        groups.setdefault(id(job.workspace or job), []).append(job)
    for group in groups.values():
        workspace = group[0].workspace
        n_passes += 1
        if workspace is None:
            group[0].execute()
            continue
        begun_at = time.perf_counter()
        try:
            if len(group) == 1:
                results: list[NDArray[np.float32] | None] = [group[0].run()]
            else:
                results = workspace.forward([(job.runner, job.tokens, None) for job in group])
        except BaseException as error:
            for job in group:
                job.fail(error)
            continue
        n_guesses = sum(len(job.tokens) - 1 for job in group)
        # Before anybody chooses by them how far to guess.
        costs.measure_step(len(group), n_guesses, time.perf_counter() - begun_at)
        for job, logits in zip(group, results, strict=True):
            assert logits is not None
            job.finish(logits)
    return n_passes
