"""The HTTP interface: OpenAI's, and what clients of local servers ask for besides."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .._version import __version__
from ..config import SamplingParams
from .admission import Admission
from .answer_format import AnswerFormat
from .answers import Event, Finished
from .api_error import ApiError
from .event_flow import collect, end_work, finish_or_leave, format_stream
from .event_stream import HEARTBEAT_S, EventStream
from .http_body import (
    AllowedHosts,
    HeldBodies,
    error_response,
    read_body,
    refuse_path,
    require_one_length,
)
from .infill import read_infill_request
from .llama_server import CompletionFormat, describe_place, describe_server
from .metrics import CONTENT_TYPE, Metrics
from .openai_format import ChatFormat, TextFormat
from .page import page_response
from .requests import (
    GenerationRequest,
    read_chat_request,
    read_completion_request,
    read_text_request,
)

if TYPE_CHECKING:
    from .answers import AnswerEngine
    from .fields import Fields

DRAIN_S = 20.0
_NOT_SERVED = {
    "/v1/embeddings": "this server runs models that generate text; use another one for embeddings",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/audio/transcriptions": "this server reads text only",
    "/v1/images/generations": "this server writes text only",
}
_OPEN_PATHS = ("/health", "/")  # without an API key


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How requests are admitted; ``timeout_s`` is for a whole answer, 0 for none.

    ``allowed_hosts`` are the names by which browsers may call the server, None for any;
    ``cors_origins`` the pages of other origins that may.
    """

    model_name: str
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    parallel: int = 4
    max_queue: int = 32
    timeout_s: float = 0.0
    sampling: SamplingParams = field(default_factory=SamplingParams)


def make_app(engine: AnswerEngine, settings: ServerSettings) -> Starlette:
    """The application; its lifespan ends the requests in progress and closes the engine."""
    return _Server(engine, settings).app


class _Server:
    def __init__(self, engine: AnswerEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._metrics = Metrics(engine)
        self._admission = Admission(
            engine, self._metrics, parallel=settings.parallel, max_queue=settings.max_queue
        )
        self._started_at = int(time.time())
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/", self._guard(page_response), methods=get),
            Route("/health", self._guard(self._health), methods=get),
            Route("/metrics", self._guard(self._show_metrics), methods=get),
            Route("/props", self._guard(self._props), methods=get),
            Route("/v1/chat/completions", self._guard(self._chat), methods=post),
            Route("/v1/completions", self._guard(self._complete), methods=post),
            # As llama-server names them.
            Route("/chat/completions", self._guard(self._chat), methods=post),
            Route("/completion", self._guard(self._complete_bare), methods=post),
            Route("/completions", self._guard(self._complete_bare), methods=post),
            Route("/infill", self._guard(self._infill), methods=post),
            Route("/apply-template", self._guard(self._apply_template), methods=post),
            Route("/slots", self._guard(self._slots), methods=get),
        ]
        for prefix in ("", "/v1"):
            routes += [
                Route(f"{prefix}/models", self._guard(self._models), methods=get),
                Route(f"{prefix}/tokenize", self._guard(self._tokenize), methods=post),
                Route(f"{prefix}/detokenize", self._guard(self._detokenize), methods=post),
            ]
        routes.append(Route("/v1/models/{name:path}", self._guard(self._model), methods=get))
        for path in _NOT_SERVED:
            routes.append(Route(path, self._guard(self._refuse), methods=post))
        middleware = [Middleware(HeldBodies)]
        if settings.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(settings.cors_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                )
            )
        if settings.allowed_hosts is not None:
            middleware.append(Middleware(AllowedHosts, names=settings.allowed_hosts))
        self.app = Starlette(
            routes=routes,
            middleware=middleware,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: refuse_path},  # type: ignore[dict-item]
        )
        self.app.state.drain = lambda: self._admission.drain(DRAIN_S)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._admission.drain(DRAIN_S)
            self._engine.close()

    def _guard(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Asks for the key and turns errors into answers."""

        async def guarded(request: Request) -> Response:
            try:
                require_one_length(request)
                self._require_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except Exception as error:
                return error_response(error)

        return guarded

    def _require_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None or request.url.path in _OPEN_PATHS:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.encode("latin-1")  # the bytes of the header
        if kind.lower() == "bearer" and hmac.compare_digest(sent, key.encode()):
            return
        raise ApiError(
            "Incorrect API key provided; send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )

    async def _health(self, _: Request) -> Response:
        if self._admission.is_closing:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def _props(self, _: Request) -> Response:
        pool = self._engine.pool
        plan = pool.plan.for_length(pool.plan.context_size or 0)  # else by the prompt
        template = pool.model.chat_template
        own = {
            "model": self._settings.model_name,
            "context_size": pool.context_limit,
            "parallel": self._settings.parallel,
            "version": __version__,
            "has_chat_template": isinstance(template, str),
            "attention": plan.report()["attention"],
        }
        of_llama_server = describe_server(
            model=self._settings.model_name,
            n_context=pool.context_limit,
            n_slots=self._settings.parallel,
            template=template,
            defaults=self._settings.sampling,
        )
        return JSONResponse(own | of_llama_server)

    async def _slots(self, request: Request) -> Response:
        places, pool = self._admission.places, self._engine.pool
        is_full = all(place.ticket is not None for place in places)
        if is_full and request.query_params.get("fail_on_no_slot"):
            raise ApiError("no slot is free", status=503, kind="unavailable_error")
        has_draft = pool.draft is not None
        limit = pool.context_limit
        return JSONResponse([describe_place(p, limit, has_draft=has_draft) for p in places])

    def _describe_model(self) -> dict[str, Any]:
        pool = self._engine.pool
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "edgeh2o",
            "context_length": pool.context_limit,
            "max_model_len": pool.context_limit,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.model_name:
            raise ApiError(
                f"The model '{name[:200]}' does not exist", status=404, code="model_not_found"
            )
        return JSONResponse(self._describe_model())

    async def _tokenize(self, request: Request) -> Response:
        fields = await read_body(request)
        text = fields.text("content", fields.text("prompt"))
        if text is None:
            fields.refuse("content", "a string")
        tokenizer = self._engine.tokenizer
        ids = await asyncio.to_thread(
            tokenizer.encode,
            text,
            add_special=fields.flag("add_special"),
            parse_special=fields.flag("parse_special", True),
        )
        if not fields.flag("with_pieces"):
            return JSONResponse({"tokens": ids, "count": len(ids)})
        pieces = [{"id": i, "piece": _show_piece(tokenizer.token_bytes(i))} for i in ids]
        return JSONResponse({"tokens": pieces, "count": len(ids)})

    async def _detokenize(self, request: Request) -> Response:
        fields = await read_body(request)
        ids = fields.raw("tokens")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            fields.refuse("tokens", "an array of token ids")
        return JSONResponse({"content": self._engine.tokenizer.decode(ids)})

    async def _refuse(self, request: Request) -> Response:
        raise ApiError(
            f"{request.url.path} is not served: {_NOT_SERVED[request.url.path]}",
            status=501,
            code="unsupported_endpoint",
        )

    async def _chat(self, request: Request) -> Response:
        # Nothing else of the body is kept while the request waits.
        wanted = read_chat_request(await read_body(request), self._settings.sampling)
        form = ChatFormat(self._settings.model_name, include_usage=wanted.include_usage)
        return await self._respond(request, wanted, form)

    async def _complete(self, request: Request) -> Response:
        wanted = read_text_request(await read_body(request), self._settings.sampling)
        form = TextFormat(self._settings.model_name, include_usage=wanted.include_usage)
        return await self._respond(request, wanted, form)

    async def _complete_bare(self, request: Request) -> Response:
        fields = await read_body(request)
        wanted = read_completion_request(fields, self._settings.sampling)
        form = self._bare_form(fields, wanted)
        del fields
        return await self._respond(request, wanted, form)

    def _bare_form(self, fields: Fields, wanted: GenerationRequest) -> CompletionFormat:
        name, returns_tokens = self._settings.model_name, fields.flag("return_tokens")
        return CompletionFormat(name, wanted, returns_tokens=returns_tokens)

    async def _infill(self, request: Request) -> Response:
        fields = await read_body(request)
        # Its texts become tokens.
        wanted = await asyncio.to_thread(
            read_infill_request, fields, self._engine.tokenizer, self._settings.sampling
        )
        form = self._bare_form(fields, wanted)
        del fields
        return await self._respond(request, wanted, form)

    async def _apply_template(self, request: Request) -> Response:
        wanted = read_chat_request(await read_body(request), self._settings.sampling)
        prompt = await asyncio.to_thread(self._engine.open_prompt, wanted)
        text = "" if prompt.transcript is None else prompt.transcript.prompt
        return JSONResponse({"prompt": text})

    async def _respond(
        self, request: Request, wanted: GenerationRequest, form: AnswerFormat
    ) -> Response:
        """A stream's first event is awaited for a while, so that refusals have a status."""
        events = self._events(request, wanted, form)
        if not wanted.stream:
            work = asyncio.ensure_future(collect(events))
            try:
                await finish_or_leave(request, work)
                pieces, finished = work.result()
            finally:
                await end_work(work, events)
            return JSONResponse(form.whole(pieces, finished))
        first = asyncio.ensure_future(anext(events))
        try:
            await finish_or_leave(request, first, timeout_s=HEARTBEAT_S)
            if first.done():
                first.result()
        except BaseException:
            await end_work(first, events)
            raise
        return EventStream(
            format_stream(form, first, events, wanted),
            lambda: end_work(first, events),
            is_done_said=form.is_done_said,
        )

    async def _events(
        self, request: Request, wanted: GenerationRequest, form: AnswerFormat
    ) -> AsyncGenerator[Event, None]:
        client = request.client.host if request.client else ""
        outcome = "failed"
        loop = asyncio.get_running_loop()
        try:
            async with self._admission.admit(client, wanted.place) as ticket:
                form.place = ticket.place
                timer, seconds = None, self._settings.timeout_s
                if seconds:
                    reason = f"the answer took longer than {seconds:g} seconds (--timeout)"
                    timer = loop.call_later(seconds, ticket.cancel, reason)
                answer = self._admission.answer(wanted, ticket)
                try:
                    async for event in answer:
                        if isinstance(event, Finished):
                            self._metrics.count(event)
                            outcome = ""
                        yield event
                finally:
                    await answer.aclose()
                    if timer is not None:
                        timer.cancel()
        except (GeneratorExit, asyncio.CancelledError):
            outcome = outcome and "cancelled"
            raise
        except ApiError as error:
            if error.status == 429:
                outcome = "rejected"
            raise
        finally:
            if outcome:
                self._metrics.requests.labels(outcome).inc()


def _show_piece(data: bytes) -> str | list[int]:
    """A token as llama-server shows it: of a part of a character its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
