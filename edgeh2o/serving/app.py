"""The HTTP interface: OpenAI's, and what clients of local servers ask for besides."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .admission import Admission
from .answer_format import AnswerFormat, Chunk
from .answers import Event, Finished
from .anthropic_format import MessagesFormat
from .anthropic_request import read_messages_request
from .api_error import ANTHROPIC_PATH, ApiError
from .descriptions import Descriptions, Handler
from .event_flow import collect, end_all, end_work, finish_or_leave, format_stream, gather_all
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
from .llama_server import CompletionFormat
from .metrics import Metrics
from .openai_format import ChatFormat, TextFormat, join_answers
from .page import page_response
from .requests import (
    GenerationRequest,
    read_chat_request,
    read_completion_request,
    read_text_requests,
)
from .responses_format import ResponsesFormat
from .responses_request import read_responses_request
from .server_settings import ServerSettings

if TYPE_CHECKING:
    from .answers import AnswerEngine
    from .fields import Fields

DRAIN_S = 20.0
_NOT_SERVED = {
    "/v1/embeddings": "this server runs models that generate text; use another one for embeddings",
    "/v1/audio/transcriptions": "this server reads text only",
    "/v1/images/generations": "this server writes text only",
}
_OPEN_PATHS = ("/health", "/")  # without an API key


def make_app(engine: AnswerEngine, settings: ServerSettings) -> Starlette:
    """The application; its lifespan ends the requests in progress and closes the engine."""
    return _Server(engine, settings).app


class _Server:
    def __init__(self, engine: AnswerEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        engine.adapters.give_name(settings.model_name)
        self._metrics = Metrics(engine)
        self._admission = Admission(
            engine, self._metrics, parallel=settings.parallel, max_queue=settings.max_queue
        )
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/", self._guard(page_response), methods=get),
            Route("/v1/chat/completions", self._guard(self._chat), methods=post),
            Route("/v1/completions", self._guard(self._complete), methods=post),
            # As llama-server names them.
            Route("/chat/completions", self._guard(self._chat), methods=post),
            Route("/completion", self._guard(self._complete_bare), methods=post),
            Route("/completions", self._guard(self._complete_bare), methods=post),
            Route("/infill", self._guard(self._infill), methods=post),
            Route("/apply-template", self._guard(self._apply_template), methods=post),
            Route("/v1/responses", self._guard(self._respond_to_items), methods=post),
            Route(ANTHROPIC_PATH, self._guard(self._message), methods=post),
            Route(f"{ANTHROPIC_PATH}/count_tokens", self._guard(self._count_tokens), methods=post),
        ]
        routes += Descriptions(engine, settings, self._admission, self._metrics).routes(self._guard)
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

    def _guard(self, handler: Handler) -> Handler:
        """Asks for the key and turns errors into answers."""

        async def guarded(request: Request) -> Response:
            try:
                require_one_length(request)
                self._require_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except Exception as error:
                return error_response(error, request.url.path)

        return guarded

    def _require_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None or request.url.path in _OPEN_PATHS:
            return
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        # The latter is of Anthropic's interface.
        keys = [bearer if kind.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        # What is compared are the bytes of the header.
        if any(hmac.compare_digest(sent.encode("latin-1"), key.encode()) for sent in keys):
            return
        raise ApiError(
            "Incorrect API key provided; send it as 'Authorization: Bearer KEY', or as 'x-api-key'",
            status=401,
            code="invalid_api_key",
        )

    async def _refuse(self, request: Request) -> Response:
        raise ApiError(
            f"{request.url.path} is not served: {_NOT_SERVED[request.url.path]}",
            status=501,
            code="unsupported_endpoint",
        )

    async def _chat(self, request: Request) -> Response:
        # Nothing else of the body is kept while the request waits.
        wanted = read_chat_request(await read_body(request), self._settings.sampling)
        form = ChatFormat(self._name_for(wanted), include_usage=wanted.include_usage)
        return await self._respond(request, wanted, form)

    async def _complete(self, request: Request) -> Response:
        wanted = read_text_requests(await read_body(request), self._settings.sampling)
        if len(wanted) > 1:
            return await self._respond_to_all(request, wanted)
        (only,) = wanted
        form = TextFormat(self._name_for(only), include_usage=only.include_usage)
        return await self._respond(request, only, form)

    async def _complete_bare(self, request: Request) -> Response:
        fields = await read_body(request)
        wanted = read_completion_request(fields, self._settings.sampling)
        form = self._bare_form(fields, wanted)
        del fields
        return await self._respond(request, wanted, form)

    def _bare_form(self, fields: Fields, wanted: GenerationRequest) -> CompletionFormat:
        name, returns_tokens = self._name_for(wanted), fields.flag("return_tokens")
        return CompletionFormat(name, wanted, returns_tokens=returns_tokens)

    def _name_for(self, wanted: GenerationRequest) -> str:
        """The name of what answers: the model, or an adapter that is asked for by its own."""
        is_adapter = self._engine.adapters.is_named_by(wanted)
        return wanted.model if is_adapter else self._settings.model_name

    async def _infill(self, request: Request) -> Response:
        fields = await read_body(request)
        # Its texts become tokens.
        wanted = await asyncio.to_thread(
            read_infill_request, fields, self._engine.tokenizer, self._settings.sampling
        )
        form = self._bare_form(fields, wanted)
        del fields
        return await self._respond(request, wanted, form)

    async def _message(self, request: Request) -> Response:
        wanted = read_messages_request(await read_body(request), self._settings.sampling)
        return await self._respond(request, wanted, MessagesFormat(self._name_for(wanted)))

    async def _respond_to_items(self, request: Request) -> Response:
        fields = await read_body(request)
        wanted = read_responses_request(fields, self._settings.sampling)
        form = ResponsesFormat(self._name_for(wanted), wanted, fields)
        del fields
        return await self._respond(request, wanted, form)

    async def _count_tokens(self, request: Request) -> Response:
        wanted = read_messages_request(
            await read_body(request), self._settings.sampling, needs_most=False
        )
        return JSONResponse({"input_tokens": await asyncio.to_thread(self._count, wanted)})

    def _count(self, wanted: GenerationRequest) -> int:
        return len(self._engine.open_prompt(wanted).encode())

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
        chunks = format_stream(form, first, events, wanted)
        return EventStream(form, chunks, lambda: end_work(first, events))

    async def _respond_to_all(
        self, request: Request, wanted: Sequence[GenerationRequest]
    ) -> Response:
        """Several prompts of one body: as many at once as there are places, all or none."""
        places = asyncio.Semaphore(self._settings.parallel)

        async def answer(each: GenerationRequest) -> Chunk:
            form = TextFormat(self._name_for(each))
            async with places, aclosing(self._events(request, each, form)) as events:
                return form.whole(*await collect(events))

        work = asyncio.ensure_future(gather_all([answer(each) for each in wanted]))
        try:
            await finish_or_leave(request, work)
            return JSONResponse(join_answers(work.result()))
        finally:
            await end_all(work)

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
