"""The events of an answer on their way to a client, who may go at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from .answer_format import AnswerFormat, reading_timings, timings
from .answers import Event, Finished, Piece, Progress
from .api_error import ApiError
from .requests import GenerationRequest

T = TypeVar("T")


async def collect(events: AsyncIterator[Event]) -> tuple[Sequence[Piece], Finished]:
    """A whole answer. Raises what its work raises."""
    pieces = []
    async for event in events:
        if isinstance(event, Piece):
            pieces.append(event)
        elif isinstance(event, Finished):
            return pieces, event
    raise ApiError("the answer has no end", status=500, kind="server_error")


async def format_stream(
    form: AnswerFormat,
    first: asyncio.Future[Event],
    events: AsyncIterator[Event],
    wanted: GenerationRequest,
) -> AsyncIterator[Mapping[str, Any] | None]:
    """Chunks of a stream; None where something has to be sent lest the client gives up."""
    for chunk in form.begin():
        yield chunk
    event: Event | None = await asyncio.shield(first)
    if isinstance(event, Progress):  # the first event of every prompt
        for chunk in form.begin_reading(event):
            yield chunk
    while event is not None:
        if isinstance(event, Progress):
            told = form.progress(event) if wanted.wants_progress else None
            if told is not None and wanted.wants_timings:
                told |= {"timings": reading_timings(event)}
            yield told
        elif isinstance(event, Piece):
            so_far = {} if event.stats is None else {"timings": timings(event.stats)}
            for chunk in form.pieces(event):
                yield chunk | so_far
        else:
            for chunk in form.end(event):
                yield chunk
        event = await anext(events, None)


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


async def gather_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first that fails, or whoever cancels this, ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_all(work: asyncio.Future[Any]) -> None:
    """Ends ``work`` of ``gather_all``."""
    work.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await work


async def end_work(work: asyncio.Future[Any], events: AsyncGenerator[Event, None]) -> None:
    """Ends ``work``, which reads ``events``, and them; the request is cancelled by that."""
    if not work.done():
        work.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await work
    await events.aclose()


async def _wait_for_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
