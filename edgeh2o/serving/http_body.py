"""What of a request is let in, hosts and bodies, and what an error looks like to a client."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import EdgeH2OError
from .admission import RETRY_AFTER_S
from .api_error import ApiError, as_api_error
from .fields import Fields, parse_array, parse_body

T = TypeVar("T")
_logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
# Of all requests that are read, wait and are answered; small ones do not count.
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
SMALL_BODY_BYTES = 256 * 2**10
BODY_TIMEOUT_S = 60.0
# Bodies from that on take milliseconds to read: 7 for 1 MiB of text, 99 for 1.6 MiB of token ids.
LARGE_BODY_BYTES = 64 * 2**10
_TOO_MUCH_AT_ONCE = "too_much_at_once"
_HELD, _READER = "edgeh2o.held", "edgeh2o.reader"


class HeldBodies:
    """An ASGI application around another: what bodies hold in memory is bounded for all together.

    A body counts from its arrival to the end of the answer, what of it is small left out, so that
    a few large ones keep no small one out.
    """

    def __init__(self, app: ASGIApp, most: int = MAX_HELD_BYTES) -> None:
        self._app, self._most = app, most
        self._n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        def hold(n_bytes: int) -> None:
            nonlocal held
            more = max(0, n_bytes - SMALL_BODY_BYTES) - held
            if self._n_bytes + more > self._most:
                raise ApiError(
                    "too many large requests at once; try again later",
                    status=429,
                    kind="rate_limit_error",
                    code=_TOO_MUCH_AT_ONCE,
                )
            held += more
            self._n_bytes += more

        scope[_HELD] = hold
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_bytes -= held


class BodyReader:
    """An ASGI application around another: large bodies are read while streams go on.

    One after the other, in the order in which they came, small ones too: requests keep theirs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgeh2o-body")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_READER] = self
        await self._app(scope, receive, send)

    async def read(self, data: bytes, read: Callable[[bytes], T]) -> T:
        """What ``read`` makes of ``data``, or raises."""
        async with self._turn:
            if len(data) < LARGE_BODY_BYTES:
                return read(data)
            return await asyncio.get_running_loop().run_in_executor(self._thread, read, data)


class AllowedHosts:
    """An ASGI application around another, which hears only what is sent to one of its names.

    A page of the web can make a name of its own lead to this machine, but not send another one.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            name = re.sub(r":\d*$", "", host).lower()
            if name not in self._names:
                error = ApiError(
                    f"this server is not called {name[:100]!r}; call it by the address that it "
                    "printed, or start it with --host",
                    code="unknown_host",
                )
                answer = error_response(error, scope["path"])
        await answer(scope, receive, send)


async def read_body(request: Request) -> Fields:
    """The JSON object of a request. Raises ApiError for another type, too much, or too slowly."""
    return await _read_json(request, parse_body)


async def read_request(request: Request, read: Callable[[Fields], T]) -> T:
    """What ``read`` makes of the JSON object, perhaps in a thread.

    Raises as it and ``read_body``.
    """
    return await _read_json(request, lambda data: read(parse_body(data)))


async def read_array(request: Request, name: str) -> Fields:
    """The JSON array of a request, as the field ``name``. Raises as ``read_body``."""
    return await _read_json(request, lambda data: parse_array(data, name))


async def _read_json(request: Request, read: Callable[[bytes], T]) -> T:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the body must be JSON: send 'Content-Type: application/json'", status=415)
    try:
        data = await asyncio.wait_for(_read_stream(request), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ApiError("the body came too slowly", status=408) from None
    reader: BodyReader = request.scope[_READER]
    return await reader.read(data, read)


def require_one_length(request: Request) -> None:
    """Raises ApiError for a body with two lengths.

    It ends at one place for a proxy and at another one here.
    """
    if "transfer-encoding" in request.headers and "content-length" in request.headers:
        raise ApiError(
            "Content-Length and Transfer-Encoding exclude each other", code="two_lengths"
        )


async def _read_stream(request: Request) -> bytes:
    if "100-continue" in request.headers.get("expect", "").lower():
        # It asks before it sends; others would see a broken connection instead of an answer.
        _require_small(int(request.headers.get("content-length", 0)))
    data = bytearray()
    async for block in request.stream():
        data += block
        request.scope[_HELD](len(data))
        _require_small(len(data))
    return bytes(data)


def _require_small(n_bytes: int) -> None:
    if n_bytes > MAX_BODY_BYTES:
        raise ApiError(f"the body has more than {MAX_BODY_BYTES // 2**20} MiB", status=413)


def error_response(error: BaseException, path: str) -> Response:
    """What a client of ``path`` gets of an error; one that is a defect goes to the log too."""
    told = as_api_error(error)
    if not isinstance(error, (EdgeH2OError, MemoryError)):
        _logger.error("a request failed", exc_info=error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if told.status in (429, 503) else {}
    if told.code in ("two_lengths", _TOO_MUCH_AT_ONCE) or told.status in (408, 413):
        headers["Connection"] = "close"  # what follows may be a part of the body
    return JSONResponse(told.describe(path), told.status, headers)


async def refuse_path(request: Request, error: HTTPException) -> Response:
    """What a client gets of a path or a method that is not served."""
    message = "this path is not served" if error.status_code == 404 else error.detail
    told = ApiError(message, status=error.status_code)
    return JSONResponse(told.describe(request.url.path), error.status_code, error.headers)
