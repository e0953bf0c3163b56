"""Which requests are answered now, which wait, and which are sent away."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .api_error import ApiError
from .events import Event, Progress
from .ticket import Ticket

if TYPE_CHECKING:
    from .answers import AnswerEngine
    from .metrics import Metrics
    from .requests import GenerationRequest

T = TypeVar("T")

RETRY_AFTER_S = 5
# Between two reports of what was read. One for every layer of a short prompt, each of which wakes
# the event loop up, took half as long as the prompt.
PROGRESS_S = 0.05
_OWN_ADDRESSES = ("", "127.0.0.1", "::1")


@dataclass(eq=False, slots=True)
class Place:
    """Where requests are answered, one at a time; the ``n_request``-th of all is or was the last.

    -1: none was yet.
    """

    number: int
    n_request: int = -1
    ticket: Ticket | None = None
    is_taken: bool = False


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that waits for any place, or for that of a number."""

    wanted: int | None
    given: asyncio.Future[Place]


class Admission:
    """First come, first served: ``parallel`` at work, up to ``max_queue`` waiting.

    One that is to have a certain place waits for that alone, and holds up nobody who is not. A
    place is free once the work is done, however slowly the client takes the answer.

    One address may have half of the queue and of the places at most, where there are several; that
    of the machine itself, which may be a proxy, all.
    """

    def __init__(
        self, engine: AnswerEngine, metrics: Metrics, *, parallel: int, max_queue: int
    ) -> None:
        self._engine, self._metrics = engine, metrics
        self.places = tuple(Place(number) for number in range(parallel))
        self._waiting: deque[_Waiting] = deque()
        self._n_admitted = 0
        self._max_queue = max_queue
        self._most_of_one = max(parallel, (parallel + max_queue) // 2)
        self._clients: Counter[str] = Counter()
        self._tickets: set[Ticket] = set()
        self._at_work: dict[Ticket, Place] = {}
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="edgeh2o-answer")
        self.is_closing = False

    @asynccontextmanager
    async def admit(self, client: str, wanted: int | None = None) -> AsyncIterator[Ticket]:
        """Waits for a place, that of the number ``wanted`` if there is one.

        Raises ApiError where too many wait already, and for a place that there is not.
        """
        if self.is_closing:
            raise ApiError("the server is shutting down", status=503, kind="server_error")
        if wanted is not None and wanted >= len(self.places):
            raise ApiError(
                f"'id_slot' must be -1, for any, or one of the {len(self.places)} slots from 0 on "
                f"(--parallel), got {wanted}",
                param="id_slot",
            )
        is_full = self._find(wanted) is None and len(self._waiting) >= self._max_queue
        is_greedy = client not in _OWN_ADDRESSES and self._clients[client] >= self._most_of_one
        if is_full or is_greedy:
            raise ApiError(
                f"too many requests wait already ({len(self._waiting)}); try again later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self._clients[client] += 1
        ticket = Ticket()
        self._tickets.add(ticket)
        try:
            self._metrics.waiting.inc()
            try:
                place = await self._take(wanted)
            finally:
                self._metrics.waiting.dec()
            self._metrics.running.inc()
            place.ticket, place.n_request = ticket, self._n_admitted
            ticket.place = place.number
            self._at_work[ticket] = place
            self._n_admitted += 1
            try:
                yield ticket
            finally:
                self._release(ticket)
        finally:
            self._tickets.discard(ticket)
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    @asynccontextmanager
    async def admit_counted(
        self, client: str, wanted: int | None = None, *, timeout_s: float
    ) -> AsyncIterator[Ticket]:
        """As ``admit``; what takes longer than ``timeout_s``, if that is not 0, is cancelled.

        Unless ``is_answered`` of the ticket, the request counts as rejected, cancelled or failed.
        """
        ticket, outcome = None, "failed"
        try:
            async with self.admit(client, wanted) as ticket:
                timer = None
                if timeout_s:
                    reason = f"the answer took longer than {timeout_s:g} seconds (--timeout)"
                    loop = asyncio.get_running_loop()
                    timer = loop.call_later(timeout_s, ticket.cancel, reason)
                try:
                    yield ticket
                finally:
                    if timer is not None:
                        timer.cancel()
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except ApiError as error:
            if error.status == 429:
                outcome = "rejected"
            raise
        finally:
            if ticket is None or not ticket.is_answered:
                self._metrics.requests.labels(outcome).inc()

    def _find(self, wanted: int | None) -> Place | None:
        """A free place, that of the number if one is given."""
        fit = (each for each in self.places if wanted in (None, each.number))
        return next((each for each in fit if not each.is_taken), None)

    async def _take(self, wanted: int | None) -> Place:
        """A place, once it is free: whoever waits for any waits only where none is."""
        place = self._find(wanted)
        if place is not None:
            place.is_taken = True
            return place
        waiting = _Waiting(wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.given
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # it was given one at the same time
                self._leave(waiting.given.result())
            raise

    def _release(self, ticket: Ticket) -> None:
        """Others may have its place, if it has one still."""
        place = self._at_work.pop(ticket, None)
        if place is not None:
            self._metrics.running.dec()
            self._leave(place)

    def _leave(self, place: Place) -> None:
        """Gives a place to the first who waits for it."""
        place.ticket = None
        fit = (each for each in self._waiting if each.wanted in (None, place.number))
        waiting = next((each for each in fit if not each.given.done()), None)  # not one given up
        place.is_taken = waiting is not None
        if waiting is not None:
            self._waiting.remove(waiting)
            waiting.given.set_result(place)

    async def answer(
        self, request: GenerationRequest, ticket: Ticket
    ) -> AsyncGenerator[Event, None]:
        """The events of an answer; of progress the first, the latest and the last.

        Raises what the engine raises.

        Left early, the request is cancelled, and its thread waited for.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        told_at = -math.inf

        def emit(event: Event) -> None:
            nonlocal told_at
            if isinstance(event, Progress):
                if event.done < event.total and event.elapsed_s < told_at + PROGRESS_S:
                    return
                told_at = event.elapsed_s
            loop.call_soon_threadsafe(events.put_nowait, event)

        def work() -> None:
            try:
                self._engine.answer(request, emit, ticket)
            finally:
                loop.call_soon_threadsafe(events.put_nowait, None)

        done = self._start(work, ticket)
        is_first = True
        try:
            while (event := await events.get()) is not None:
                is_partial = isinstance(event, Progress) and event.done < event.total
                if is_partial and not events.empty() and not is_first:
                    continue
                is_first = False
                yield event
            await done
        finally:
            await _end(done, ticket)
            del done  # its error holds this frame: a cycle, and in it the runner

    async def run(self, work: Callable[[], T], ticket: Ticket) -> T:
        """What ``work`` of an admitted request gives, or raises.

        Left early, the request is cancelled, and its thread waited for.
        """
        done = self._start(work, ticket)
        try:
            return await asyncio.shield(done)
        finally:
            await _end(done, ticket)
            del done

    def _start(self, work: Callable[[], T], ticket: Ticket) -> asyncio.Future[T]:
        """In a thread of its own, at the end of which its place is free."""

        def work_alone() -> T:
            try:
                return work()
            except BaseException as error:
                forget_frames(error)
                raise

        done = asyncio.get_running_loop().run_in_executor(self._threads, work_alone)
        done.add_done_callback(_take_error)  # a second cancellation may leave before it is there
        done.add_done_callback(lambda _: self._release(ticket))
        return done

    def cancel_all(self, reason: str) -> None:
        """Ends all that are at work and that wait."""
        for ticket in tuple(self._tickets):
            ticket.cancel(reason)

    async def drain(self, seconds: float) -> None:
        """Lets those at work come to their end, for so long; then cancels them."""
        self.is_closing = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            while self._tickets and loop.time() < end:
                await asyncio.sleep(0.05)
        finally:
            self.cancel_all("the server is shutting down")
        while self._tickets and loop.time() < end + 10:
            await asyncio.sleep(0.05)
        self._threads.shutdown(wait=False)


async def _end(done: asyncio.Future[T], ticket: Ticket) -> None:
    """Cancels the request whose work is not done, and waits for that."""
    if not done.done():
        ticket.cancel("the client has gone")
        await asyncio.shield(asyncio.wait([done]))


def _take_error(done: asyncio.Future[T]) -> None:
    """Whoever awaits it is told besides; without that, asyncio would log it."""
    if not done.cancelled():
        done.exception()


def forget_frames(error: BaseException) -> None:
    """Empties the frames that an error came through: they hold the runner, perhaps in a cycle."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
