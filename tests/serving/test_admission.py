"""Who is answered where and when, and what is left of a request that failed."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Gauge

from edgeh2o.serving.admission import Admission, forget_frames
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.events import Progress
from edgeh2o.serving.ticket import Ticket


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


class _Requests:
    """Requests that stay at work until they are let go."""

    def __init__(self, parallel: int, max_queue: int, engine: Any = None) -> None:
        gauges = SimpleNamespace(
            running=Gauge("running", "", registry=None), waiting=Gauge("waiting", "", registry=None)
        )
        metrics: Any = gauges
        self.admission = Admission(engine, metrics, parallel=parallel, max_queue=max_queue)
        self.places: dict[str, int] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, wanted: int | None = None) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, wanted))
        await asyncio.sleep(0)

    async def _work(self, name: str, wanted: int | None) -> None:
        async with self.admission.admit("", wanted) as ticket:
            self.places[name] = ticket.place
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


def test_a_request_that_is_given_up_twice_tells_nobody_of_its_error() -> None:
    class Engine:
        def answer(self, _request: Any, emit: Any, ticket: Any) -> None:
            emit("begun")
            try:
                while True:
                    ticket.require()
                    time.sleep(0.001)
            finally:
                time.sleep(0.05)

    async def check() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        requests = _Requests(parallel=1, max_queue=8, engine=Engine())

        async def read() -> None:
            request: Any = None
            async with requests.admission.admit("") as ticket:
                async for _ in requests.admission.answer(request, ticket):
                    begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        await asyncio.gather(task, return_exceptions=True)
        del task
        await asyncio.sleep(0.1)
        gc.collect()
        return told

    assert asyncio.run(check()) == []


def test_who_waits_for_a_place_holds_up_nobody_else() -> None:
    async def check() -> None:
        requests = _Requests(parallel=2, max_queue=8)
        await requests.begin("a")
        await requests.begin("of a's place", 0)
        await requests.begin("b")
        assert requests.places == {"a": 0, "b": 1}
        await requests.begin("c")
        await requests.begin("d")
        await requests.end("b")
        assert requests.places["c"] == 1 and len(requests.places) == 3
        await requests.end("a")  # who waits for its place was there before whoever waits for any
        assert requests.places["of a's place"] == 0 and "d" not in requests.places
        await requests.end("c")
        assert requests.places["d"] == 1
        await requests.end("of a's place")
        await requests.end("d")
        await requests.begin("last", 1)
        assert requests.places["last"] == 1
        await requests.end("last")
        assert not any(place.is_taken for place in requests.admission.places)

    asyncio.run(check())


def test_who_takes_an_answer_slowly_keeps_no_place() -> None:
    """As many such clients as there are places had stopped the server."""

    class Engine:
        def answer(self, _request: Any, emit: Any, _ticket: Any) -> None:
            for event in "abc":
                emit(event)

    async def check() -> None:
        requests = _Requests(parallel=1, max_queue=8, engine=Engine())
        request: Any = None
        async with requests.admission.admit("") as ticket:
            events = requests.admission.answer(request, ticket)
            assert await anext(events) == "a"
            await requests.begin("next")
            end = time.monotonic() + 20
            while "next" not in requests.places and time.monotonic() < end:
                await asyncio.sleep(0.01)
            assert requests.places == {"next": 0}
            assert [event async for event in events] == ["b", "c"]
        assert requests.admission.places[0].is_taken  # by the other one still
        await requests.end("next")
        assert not requests.admission.places[0].is_taken

    asyncio.run(check())


def test_who_is_given_up_while_waiting_takes_no_place() -> None:
    async def check() -> None:
        requests = _Requests(parallel=1, max_queue=8)
        at_work = requests.admission.admit("")
        await at_work.__aenter__()
        for name in "abc":
            await requests.begin(name)
        requests.tasks["a"].cancel()  # before it is there
        await at_work.__aexit__(None, None, None)
        requests.tasks["b"].cancel()  # when it was given one, and does not know yet
        await asyncio.gather(*(requests.tasks[name] for name in "ab"), return_exceptions=True)
        await asyncio.sleep(0)
        assert requests.places == {"c": 0}
        await requests.end("c")
        assert not requests.admission.places[0].is_taken

    asyncio.run(check())


def test_a_queue_for_one_place_is_a_queue() -> None:
    async def check() -> None:
        requests = _Requests(parallel=2, max_queue=1)
        await requests.begin("a", 1)
        await requests.begin("b", 1)
        await requests.begin("c", 1)
        with pytest.raises(ApiError, match="too many requests wait already"):
            await requests.tasks["c"]
        await requests.begin("d", 0)
        assert requests.places == {"a": 1, "d": 0}
        await requests.begin("e", 2)
        with pytest.raises(ApiError, match="one of the 2 slots from 0 on"):
            await requests.tasks["e"]
        for name in "abd":
            await requests.end(name)

    asyncio.run(check())


def test_progress_of_fast_layers_is_thinned() -> None:
    """Every report wakes the event loop up, in the way of those that read."""

    class Engine:
        def answer(self, request: object, emit: Any, ticket: Ticket) -> None:
            for done in range(101):
                emit(Progress(done, 100, elapsed_s=0.004 * done))

    async def collect() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        n_woken, wake = 0, loop.call_soon_threadsafe

        def count(*args: Any, **options: Any) -> Any:
            nonlocal n_woken
            n_woken += 1
            return wake(*args, **options)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        admission = _Requests(1, 1, Engine()).admission
        request: Any = SimpleNamespace()
        told = [
            event.done
            async for event in admission.answer(request, Ticket())
            if isinstance(event, Progress)
        ]
        return told, n_woken

    told, n_woken = asyncio.run(collect())
    assert told[0] == 0  # the others may not be worth telling any more
    assert 9 <= n_woken <= 13  # every 50 ms of 400, the last, the end of events and of the work
