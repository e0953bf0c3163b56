"""The HTTP interface: OpenAI's, and what clients of local servers ask for besides."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
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
from .anthropic_format import MessagesFormat
from .anthropic_request import read_messages_request
from .api_error import ANTHROPIC_PATH, ApiError
from .descriptions import Descriptions, Handler
from .embeddings import Embeddings
from .event_flow import (
    collect,
    end_work,
    finish_or_cancel,
    finish_or_leave,
    format_stream,
    join_events,
)
from .event_stream import HEARTBEAT_S, EventStream
from .events import Event, Finished
from .http_body import (
    AllowedHosts,
    BodyReader,
    HeldBodies,
    error_response,
    read_body,
    read_request,
    refuse_path,
    require_one_length,
)
from .infill import read_infill_request
from .llama_server import CompletionFormat
from .metrics import Metrics
from .openai_format import ChatFormat, TextFormat, WholeObject
from .page import page_response
from .prompt_fields import MAX_PROMPTS
from .requests import (
    GenerationRequest,
    read_chat_request,
    read_completion_requests,
    read_text_requests,
    repeat_request,
    take_count,
)
from .responses_format import ResponsesFormat
from .responses_request import read_responses_request
from .server_settings import ServerSettings
from .slot_paths import SLOT_PATH, SlotActions
from .whole_answers import write_answers

if TYPE_CHECKING:
    from .answers import AnswerEngine
    from .fields import Fields

DRAIN_S = 20.0
_NO_SOUND = "this server reads text only"
_NOT_SERVED = {
    **dict.fromkeys(("/v1/audio/transcriptions", "/audio/transcriptions"), _NO_SOUND),
    "/v1/images/generations": "this server writes text only",
    "/props": "its properties do not change while it runs; start it with other flags",
}
# Origins that "localhost" stands for.
_OWN_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_PREFIXES = ("/v1", "")
_RANKINGS = ("rerank", "reranking")
_COUNTED = "response.input_tokens"
_OPEN_PATHS = ("/health", "/v1/health", "/")  # without an API key


def make_app(engine: AnswerEngine, settings: ServerSettings) -> Starlette:
    """The application; its lifespan ends the requests in progress and closes the engine."""
    return _Server(engine, settings).app


class _Server:
    def __init__(self, engine: AnswerEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        for name in (settings.model_name, *settings.aliases):
            engine.adapters.give_name(name)
        self._metrics = Metrics(engine)
        self._admission = Admission(
            engine, self._metrics, parallel=settings.parallel, max_queue=settings.max_queue
        )
        vectors = Embeddings(engine, settings, self._admission, self._metrics)
        get, post = ["GET"], ["POST"]
        routes = [Route("/", self._guard(page_response), methods=get)]
        for handler, paths in (
            # Those without /v1 as llama-server names them.
            (self._chat, ("/v1/chat/completions", "/chat/completions")),
            (self._complete, ("/v1/completions",)),
            (self._complete_bare, ("/completion", "/completions")),
            (self._infill, ("/infill",)),
            (self._apply_template, ("/apply-template",)),
            (self._respond_to_items, ("/v1/responses", "/responses")),
            (vectors.answer_openai, ("/v1/embeddings",)),
            (vectors.answer, ("/embeddings", "/embedding")),
            (vectors.rerank, tuple(f"{p}/{name}" for p in _PREFIXES for name in _RANKINGS)),
            (self._message, (ANTHROPIC_PATH,)),
            (self._count_tokens, (f"{ANTHROPIC_PATH}/count_tokens",)),
            (self._count_of_chat, tuple(f"{p}/chat/completions/input_tokens" for p in _PREFIXES)),
            (self._count_of_items, tuple(f"{p}/responses/input_tokens" for p in _PREFIXES)),
            (SlotActions(engine.slots, self._admission).act, (SLOT_PATH,)),
            (self._refuse, tuple(_NOT_SERVED)),
        ):
            routes += [Route(path, self._guard(handler), methods=post) for path in paths]
        routes += Descriptions(engine, settings, self._admission, self._metrics).routes(self._guard)
        middleware = [Middleware(HeldBodies), Middleware(BodyReader)]
        if settings.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=settings.cors_origins,
                    allow_origin_regex=_OWN_PAGES if "localhost" in settings.cors_origins else None,
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
        self.app.state.give_up_saving = engine.give_up_saving

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._admission.drain(DRAIN_S)
            await asyncio.to_thread(self._engine.close)  # signals are heard meanwhile

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
        keys = self._settings.api_keys
        if not keys or request.url.path in _OPEN_PATHS:
            return
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        # The latter is of Anthropic's interface.
        given = [bearer if kind.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        # What is compared are the bytes of the header.
        pairs = [(sent.encode("latin-1"), key.encode()) for sent in given for key in keys]
        if any([hmac.compare_digest(sent, key) for sent, key in pairs]):  # always all of them
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
        def read(fields: Fields) -> tuple[Fields, int, list[GenerationRequest]]:
            fields, n = take_count(fields)
            wanted = read_chat_request(fields, self._settings.sampling)
            return fields, n, repeat_request(wanted, n)

        fields, n, wanted = await read_request(request, read)
        forms, whole = [], WholeObject(n)
        for index, each in enumerate(wanted):
            form = ChatFormat(self._name_for(each), whole, index, include_usage=each.include_usage)
            if fields.flag("verbose"):
                form.verbose = self._bare_form(fields, each, index)
            forms.append(form)
        del fields  # nothing else of the body is kept while the request waits
        return await self._respond_to_all(request, wanted, forms, whole.join, n)

    async def _complete(self, request: Request) -> Response:
        def read(fields: Fields) -> tuple[int, list[GenerationRequest]]:
            fields, n = take_count(fields)
            return n, read_text_requests(fields, self._settings.sampling)

        n, prompts = await read_request(request, read)
        wanted = _repeat_all(prompts, n)
        usage, whole = wanted[0].include_usage, WholeObject(len(wanted), n)
        forms = [
            TextFormat(self._name_for(each), whole, index, include_usage=usage)
            for index, each in enumerate(wanted)
        ]
        return await self._respond_to_all(request, wanted, forms, whole.join, n)

    async def _complete_bare(self, request: Request) -> Response:
        def read(fields: Fields) -> tuple[Fields, int, list[GenerationRequest]]:
            fields, n = take_count(fields)
            return fields, n, read_completion_requests(fields, self._settings.sampling)

        fields, n, prompts = await read_request(request, read)
        wanted = _repeat_all(prompts, n)
        forms = [self._bare_form(fields, each, index) for index, each in enumerate(wanted)]
        del fields
        return await self._respond_to_all(request, wanted, forms, list, n)

    def _bare_form(
        self, fields: Fields, wanted: GenerationRequest, index: int = 0
    ) -> CompletionFormat:
        name, tokenizer = self._name_for(wanted), self._engine.tokenizer
        return CompletionFormat(name, wanted, tokenizer, fields, index=index)

    def _name_for(self, wanted: GenerationRequest) -> str:
        return self._engine.adapters.name_of_answer(wanted, self._settings.model_name)

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
        read = partial(read_messages_request, defaults=self._settings.sampling)
        wanted = await read_request(request, read)
        return await self._respond(request, wanted, MessagesFormat(self._name_for(wanted)))

    async def _respond_to_items(self, request: Request) -> Response:
        def read(fields: Fields) -> tuple[Fields, GenerationRequest]:
            return fields, read_responses_request(fields, self._settings.sampling)

        fields, wanted = await read_request(request, read)
        form = ResponsesFormat(self._name_for(wanted), wanted, fields)
        del fields
        return await self._respond(request, wanted, form)

    async def _count_tokens(self, request: Request) -> Response:
        return await self._count(request, partial(read_messages_request, needs_most=False))

    async def _count_of_chat(self, request: Request) -> Response:
        return await self._count(request, read_chat_request, object=_COUNTED)

    async def _count_of_items(self, request: Request) -> Response:
        return await self._count(request, read_responses_request, object=_COUNTED)

    async def _count(
        self, request: Request, read: Callable[..., GenerationRequest], **said: str
    ) -> Response:
        """The tokens of its prompt, which is made and not read."""
        wanted = await read_request(request, partial(read, defaults=self._settings.sampling))
        ids = await asyncio.to_thread(lambda: self._engine.open_prompt(wanted).encode())
        return JSONResponse({**said, "input_tokens": len(ids)})

    async def _apply_template(self, request: Request) -> Response:
        read = partial(read_chat_request, defaults=self._settings.sampling)
        wanted = await read_request(request, read)
        prompt = await asyncio.to_thread(self._engine.open_prompt, wanted)
        return JSONResponse({"prompt": prompt.text})

    async def _respond(
        self, request: Request, wanted: GenerationRequest, form: AnswerFormat
    ) -> Response:
        """An answer."""
        return await self._respond_to_all(request, [wanted], [form], list)

    async def _respond_to_all(
        self,
        request: Request,
        wanted: Sequence[GenerationRequest],
        forms: Sequence[AnswerFormat],
        join: Callable[[Sequence[Chunk]], object],
        n_of_prompt: int = 1,
    ) -> Response:
        """An answer, or several, of which ``join`` makes one object; as many at once as may be.

        A stream's first event is awaited for a while, so that refusals have a status.
        """
        answers = [self._events(request, *each) for each in zip(wanted, forms, strict=True)]
        n_at_once = self._settings.parallel
        events = join_events(answers, n_of_prompt=n_of_prompt, n_at_once=n_at_once)
        if not wanted[0].stream:
            try:
                told = await finish_or_cancel(request, collect(events, len(forms)))
            finally:
                await events.aclose()
            return Response(
                await write_answers(forms, told, join), media_type=JSONResponse.media_type
            )
        first = asyncio.ensure_future(anext(events))
        try:
            await finish_or_leave(request, first, timeout_s=HEARTBEAT_S)
            if first.done():
                first.result()
        except BaseException:
            await end_work(first, events)
            raise
        chunks = format_stream(forms, first, events, wanted[0])
        return EventStream(forms[0], chunks, lambda: end_work(first, events))

    async def _events(
        self, request: Request, wanted: GenerationRequest, form: AnswerFormat
    ) -> AsyncGenerator[Event, None]:
        client = request.client.host if request.client else ""
        place = wanted.place if wanted.place in range(self._settings.parallel) else None
        seconds = self._settings.timeout_s
        async with self._admission.admit_counted(client, place, timeout_s=seconds) as ticket:
            form.place = ticket.place
            answer = self._admission.answer(wanted, ticket)
            try:
                async for event in answer:
                    if isinstance(event, Finished):
                        self._metrics.count(event)
                        ticket.is_answered = True
                    yield event
            finally:
                await answer.aclose()


def _repeat_all(prompts: Sequence[GenerationRequest], n: int) -> list[GenerationRequest]:
    """Requests for ``n`` answers to each of ``prompts``. Raises ApiError for too many."""
    if len(prompts) * n > MAX_PROMPTS:
        raise ApiError(f"more than {MAX_PROMPTS} answers are wanted", param="n")
    return [each for prompt in prompts for each in repeat_request(prompt, n)]
