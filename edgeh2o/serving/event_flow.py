"""The events of answers on their way to a client, who may go at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request

from .answer_format import AnswerFormat, reading_timings, timings
from .api_error import ApiError
from .events import Event, Finished, Piece, Progress
from .requests import GenerationRequest

# An event of one of several answers, which its number names.
Told: TypeAlias = tuple[int, Event]
WholeAnswer: TypeAlias = tuple[Sequence[Piece], Finished]
T = TypeVar("T")


async def collect(events: AsyncIterator[Told], n_answers: int) -> list[WholeAnswer]:
    """Whole answers. Raises what their work raises."""
    pieces: list[list[Piece]] = [[] for _ in range(n_answers)]
    ends: dict[int, Finished] = {}
    async for index, event in events:
        if isinstance(event, Piece):
            pieces[index].append(event)
        elif isinstance(event, Finished):
            ends[index] = event
    if len(ends) < n_answers:
        raise ApiError("the answer has no end", status=500, kind="server_error")
    return [(each, ends[index]) for index, each in enumerate(pieces)]


async def format_stream(
    forms: Sequence[AnswerFormat],
    first: asyncio.Future[Told],
    events: AsyncIterator[Told],
    wanted: GenerationRequest,
) -> AsyncIterator[Mapping[str, Any] | None]:
    """Chunks of a stream, each of the answer that it is of.

    None where something has to be sent lest the client gives up.
    """
    for form in forms:
        for chunk in form.begin():
            yield chunk
    is_begun = [False] * len(forms)
    told: Told | None = await asyncio.shield(first)
    while told is not None:
        index, event = told
        form = forms[index]
        if isinstance(event, Progress):  # the first event of every prompt
            for chunk in () if is_begun[index] else form.begin_reading(event):
                yield chunk
            is_begun[index] = True
            progress = form.progress(event) if wanted.wants_progress else None
            if progress is not None and wanted.wants_timings:
                progress |= {"timings": reading_timings(event)}
            yield progress
        elif isinstance(event, Piece):
            so_far = {} if event.stats is None else {"timings": timings(event.stats)}
            for chunk in form.pieces(event):
                yield chunk | so_far
        else:
            for chunk in form.end(event):
                yield chunk
        told = await anext(events, None)


async def join_events(
    answers: Sequence[AsyncGenerator[Event, None]], *, n_of_prompt: int, n_at_once: int
) -> AsyncGenerator[Told, None]:
    """The events of several answers of one body, as they come: all or none.

    Those of a prompt follow each other in ``answers``; the first is written alone, and its prompt
    is not read again for the others.
    """
    if len(answers) == 1:
        async with aclosing(answers[0]) as events:
            async for event in events:
                yield 0, event
        return
    places = asyncio.Semaphore(n_at_once)
    queue: asyncio.Queue[Told | None] = asyncio.Queue()

    async def read(index: int) -> None:
        async with places, aclosing(answers[index]) as events:
            async for event in events:
                queue.put_nowait((index, event))

    async def read_prompt(first: int) -> None:
        await read(first)
        await _gather_all([read(index) for index in range(first + 1, first + n_of_prompt)])

    prompts = range(0, len(answers), n_of_prompt)
    work = asyncio.ensure_future(_gather_all([read_prompt(first) for first in prompts]))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (told := await queue.get()) is not None:
            yield told
        work.result()
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await work


async def finish_or_cancel(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives, or raises. ClientDisconnect, and its end, if the client goes before."""
    task = asyncio.ensure_future(work)
    try:
        await finish_or_leave(request, task)
        return task.result()
    finally:
        await _cancel(task)
        del task  # its error holds this frame


async def finish_or_leave(
    request: Request, work: asyncio.Future[Any], *, timeout_s: float | None = None
) -> None:
    """Waits for ``work``. Raises ClientDisconnect if the client goes before it is done."""
    gone = asyncio.ensure_future(_wait_for_end(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        if gone.done() and not work.done():
            raise ClientDisconnect
    finally:
        gone.cancel()


async def _gather_all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; the first that fails, or whoever cancels this, ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_work(work: asyncio.Future[Any], events: AsyncGenerator[Told, None]) -> None:
    """Ends ``work``, which reads ``events``, and them; the request is cancelled by that."""
    await _cancel(work)
    await events.aclose()


async def _cancel(work: asyncio.Future[Any]) -> None:
    """Ends it, unless it is done, whatever comes of it."""
    if not work.done():
        work.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await work


async def _wait_for_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
