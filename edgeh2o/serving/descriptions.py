"""What a server tells besides answers: what it is and does, and texts as tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .._version import __version__
from ..engine.payoff_lengths import describe_lengths
from ..model_config import DecoderConfig
from .admission import Admission
from .api_error import ApiError
from .http_body import read_array, read_body
from .llama_server import describe_place, describe_server
from .metrics import CONTENT_TYPE, Metrics
from .prompt_fields import join_prompt, read_parts
from .requests import read_scales
from .server_settings import ServerSettings

if TYPE_CHECKING:
    from .answers import AnswerEngine

Handler = Callable[[Request], Awaitable[Response]]
_OF_OLLAMA = {
    **dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), ""),
    "type": "model",
    "tags": [""],
    "capabilities": ["completion"],
    "details": {
        **dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), ""),
        "format": "gguf",
        "families": [""],
    },
}


class Descriptions:
    """Handlers of the paths that ask nothing of the model but its tokenizer."""

    def __init__(
        self,
        engine: AnswerEngine,
        settings: ServerSettings,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._engine, self._settings = engine, settings
        self._admission, self._metrics = admission, metrics
        self._started_at = int(time.time())

    def routes(self, guard: Callable[[Handler], Handler]) -> list[Route]:
        """The paths; ``guard`` is around every handler."""
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/metrics", guard(self._show_metrics), methods=get),
            Route("/props", guard(self._props), methods=get),
            Route("/slots", guard(self._slots), methods=get),
            Route("/lora-adapters", guard(self._adapters), methods=get),
            Route("/lora-adapters", guard(self._set_adapters), methods=post),
        ]
        for prefix in ("", "/v1"):
            routes += [
                Route(f"{prefix}/health", guard(self._health), methods=get),
                Route(f"{prefix}/models", guard(self._models), methods=get),
                Route(f"{prefix}/tokenize", guard(self._tokenize), methods=post),
                Route(f"{prefix}/detokenize", guard(self._detokenize), methods=post),
            ]
        routes.append(Route("/v1/models/{name:path}", guard(self._model), methods=get))
        return routes

    async def _health(self, _: Request) -> Response:
        if self._admission.is_closing:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, _: Request) -> Response:
        headers = {"Process-Start-Time-Unix": str(self._started_at)}
        return Response(self._metrics.render(), media_type=CONTENT_TYPE, headers=headers)

    @cached_property
    def _lengths(self) -> Mapping[str, str]:
        """Once it is asked for: it may take as long as 60 ms."""
        return describe_lengths(self._engine.pool.plan, self._engine.pool.model.model)

    async def _props(self, _: Request) -> Response:
        pool = self._engine.pool
        plan = pool.plan.for_length(pool.plan.context_size or 0)  # else by the prompt
        template = pool.prompts.template_source
        own = {
            "model": self._settings.model_name,
            "context_size": pool.context_limit,
            "parallel": self._settings.parallel,
            "version": __version__,
            "has_chat_template": isinstance(template, str),
            "attention": {**plan.report()["attention"], **self._lengths},
        }
        of_llama_server = describe_server(
            self._settings, self._engine.tokenizer, template, n_context=pool.context_limit
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

    async def _adapters(self, _: Request) -> Response:
        return JSONResponse(self._engine.adapters.describe())

    async def _set_adapters(self, request: Request) -> Response:
        scales = read_scales(await read_array(request, "body"), "body")
        self._engine.adapters.set_scales(scales)
        return JSONResponse({"success": True})

    def _describe_model(self, name: str) -> dict[str, Any]:
        """The model, or an adapter, which clients may ask for as for a model."""
        pool, own = self._engine.pool, self._settings.model_name
        config, is_own = pool.plan.config, name == own
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "edgeh2o",
            "aliases": list(self._settings.aliases) if is_own else [],
            "tags": list(self._settings.tags),
            "context_length": pool.context_limit,
            "max_model_len": pool.context_limit,
            **({} if is_own else {"parent": own}),
            "meta": {
                "n_vocab": config.vocab_size,
                "n_ctx": pool.context_limit,
                "n_ctx_train": config.context_length,
                **({"n_embd": config.model_dim} if isinstance(config, DecoderConfig) else {}),
                "size": pool.model.weight_bytes,
            },
        }

    async def _models(self, _: Request) -> Response:
        models = [self._describe_model(name) for name in self._names]
        # Ollama's form of the list, beside which llama-server has OpenAI's.
        named = [{"name": n, "model": n, **_OF_OLLAMA} for n in self._names]
        return JSONResponse({"models": named, "object": "list", "data": models})

    @property
    def _names(self) -> Sequence[str]:
        return [self._settings.model_name, *self._engine.adapters.names]

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in self._settings.aliases:
            name = self._settings.model_name
        if name not in self._names:
            raise ApiError(
                f"The model '{name[:200]}' does not exist", status=404, code="model_not_found"
            )
        return JSONResponse(self._describe_model(name))

    async def _tokenize(self, request: Request) -> Response:
        fields = await read_body(request)
        tokenizer = self._engine.tokenizer
        name = "content" if fields.raw("prompt") is None else fields.first("content", "prompt")
        ids = await asyncio.to_thread(
            join_prompt,
            read_parts(fields, name),
            tokenizer,
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
        text = await asyncio.to_thread(self._engine.tokenizer.decode, ids)
        return JSONResponse({"content": text})


def _show_piece(data: bytes) -> str | list[int]:
    """A token as llama-server shows it: of a part of a character its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
