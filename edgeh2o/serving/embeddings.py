"""Vectors of texts and ranks over HTTP: OpenAI's ``/v1/embeddings``, paths of llama-server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.embedding import (
    MOST_POWER,
    NO_NORM,
    choose_pooling,
    normalise,
)
from ..engine.ranking import find_scores, require_ranking, require_template
from ..errors import UsageError
from ..model_config import DecoderConfig
from .admission import Admission
from .api_error import ApiError
from .event_flow import finish_or_cancel
from .http_body import read_request
from .prompt_fields import TextPrompt, join_prompt, read_prompts
from .prompt_vectors import embed_prompts
from .requests import read_scales

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .answers import AnswerEngine
    from .fields import Fields
    from .metrics import Metrics
    from .server_settings import ServerSettings
    from .ticket import Ticket

# Makes the body of an answer, and says how many tokens were read.
Work = Callable[["Ticket"], "tuple[bytes, int]"]

MAX_TEXTS = 2048
# Of an answer without pooling: 80 MB of JSON.
MAX_NUMBERS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Texts, and the form that their vectors are wanted in.

    ``is_bare``: that of llama-server. ``power`` is the norm, None where it is not said.
    """

    prompts: Sequence[TextPrompt]
    is_bare: bool
    is_base64: bool = False
    power: int | None = None
    dimensions: int | None = None
    model: str = ""
    lora: Mapping[int, float]


def read_embedding_request(fields: Fields, *, is_bare: bool) -> EmbeddingRequest:
    """A body of the one or the other path. Raises ApiError."""
    name = "input" if fields.raw("input") is not None else "content"
    if fields.raw(name) is None:
        raise ApiError("'input' or 'content' must be given", param="input")
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        fields.refuse("encoding_format", "float or base64")
    return EmbeddingRequest(
        prompts=read_prompts(fields, name, MAX_TEXTS),
        is_bare=is_bare or name == "content",  # which OpenAI has not
        is_base64=encoding == "base64",
        power=fields.integer("embd_normalize", NO_NORM, MOST_POWER),
        dimensions=fields.integer("dimensions", 1, 2**31),
        model=fields.text("model") or "",
        lora=read_scales(fields),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """A query and documents; ``is_tei`` is the form of text-embeddings-inference, else Jina's."""

    query: str
    documents: Sequence[str]
    most: int
    is_tei: bool = False
    has_texts: bool = False
    model: str = ""
    lora: Mapping[int, float]

    def describe(self, scores: Sequence[float], n_tokens: int, model: str) -> object:
        """The answer: the best documents first, equal ones in their order."""
        label = "score" if self.is_tei else "relevance_score"
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.most]
        found = [
            {
                "index": i,
                label: scores[i],
                **({"text": self.documents[i]} if self.has_texts else {}),
            }
            for i in order
        ]
        if self.is_tei:
            return found
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"model": model, "object": "list", "usage": usage, "results": found}


def read_rank_request(fields: Fields) -> RankRequest:
    """A body, with the fields of llama-server. Raises ApiError."""
    is_tei = fields.raw("texts") is not None
    name = fields.first("documents", "texts")
    query, documents = fields.text("query"), fields.raw(name)
    if query is None:
        fields.refuse("query", "a string")
    is_list = isinstance(documents, list) and all(isinstance(each, str) for each in documents)
    if not is_list or not 0 < len(documents) <= MAX_TEXTS:
        fields.refuse(name, f"an array of 1 to {MAX_TEXTS} strings")
    return RankRequest(
        query=query,
        documents=documents,
        most=fields.integer("top_n", 0, 2**31, len(documents)) or 0,
        is_tei=is_tei,
        has_texts=is_tei and fields.flag("return_text"),
        model=fields.text("model") or "",
        lora=read_scales(fields),
    )


class Embeddings:
    """Answers requests for vectors and ranks; they wait for places as those for texts do."""

    def __init__(
        self,
        engine: AnswerEngine,
        settings: ServerSettings,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._engine, self._settings = engine, settings
        self._admission, self._metrics = admission, metrics

    async def answer(self, request: Request) -> Response:
        """In the form of llama-server."""
        return await self._respond(request, is_bare=True)

    async def answer_openai(self, request: Request) -> Response:
        """In that of OpenAI."""
        return await self._respond(request, is_bare=False)

    async def rerank(self, request: Request) -> Response:
        """Ranks of documents, in the form of Jina or of text-embeddings-inference (TEI)."""
        wanted = await read_request(request, read_rank_request)
        return await self._answer(request, partial(self._rank, wanted))

    async def _respond(self, request: Request, *, is_bare: bool) -> Response:
        wanted = await read_request(request, partial(read_embedding_request, is_bare=is_bare))
        return await self._answer(request, partial(self._work, wanted))

    async def _answer(self, request: Request, work: Work) -> Response:
        client = request.client.host if request.client else ""
        body = await finish_or_cancel(request, self._run(client, work))
        return Response(body, media_type="application/json")

    async def _run(self, client: str, work: Work) -> bytes:
        """The body of the answer, once there was a place for it."""
        seconds = self._settings.timeout_s
        async with self._admission.admit_counted(client, timeout_s=seconds) as ticket:
            body, n_tokens = await self._admission.run(partial(work, ticket), ticket)
            ticket.is_answered = True
            self._metrics.count_read(n_tokens)
        return body

    def _work(self, wanted: EmbeddingRequest, ticket: Ticket) -> tuple[bytes, int]:
        """The body, and how many tokens the texts have; in a thread of its own."""
        engine, config = self._engine, self._engine.pool.plan.config
        if not isinstance(config, DecoderConfig) or engine.pool.plan.has_device_memory:
            raise ApiError(
                "embeddings are made of models on the CPU (--device cpu) that are no ONNX ones",
                status=501,
                code="unsupported_endpoint",
            )
        pooling = choose_pooling(config, self._settings.pooling)
        if pooling == "none" and not wanted.is_bare:
            raise ApiError(
                "the model's file names no pooling, so that there is a vector for every token; "
                "start the server with --pooling mean or last, or call /embeddings"
            )
        if wanted.dimensions not in (None, config.model_dim):
            raise ApiError(
                f"'dimensions' must be {config.model_dim}, which vectors of this model have; cut "
                "them yourself if it was trained for that",
                param="dimensions",
            )
        scales = engine.adapters.scales_of(wanted)
        prompts = [self._tokenise(prompt, ticket) for prompt in wanted.prompts]
        n_tokens = sum(map(len, prompts))
        if pooling == "none" and n_tokens * config.model_dim > MAX_NUMBERS:
            raise ApiError(
                f"vectors of {n_tokens} tokens have more than {MAX_NUMBERS} numbers; send fewer, "
                "or start the server with --pooling mean or last"
            )
        vectors = embed_prompts(
            engine.pool, prompts, pooling, adapter_scales=scales, require=ticket.require
        )
        power = self._settings.vector_power if wanted.power is None else wanted.power
        if pooling != "none":  # of tokens they stay as they are, as in llama-server
            vectors = [normalise(vector, power) for vector in vectors]
        said = _say_bare(vectors) if wanted.is_bare else self._say(vectors, wanted, n_tokens)
        return json.dumps(said, separators=(",", ":")).encode(), n_tokens

    def _rank(self, wanted: RankRequest, ticket: Ticket) -> tuple[bytes, int]:
        """As ``_work``."""
        pool = self._engine.pool
        try:
            require_template(pool.plan.config)
            ranking = require_ranking(pool.plan.config)
            if pool.plan.has_device_memory:
                raise UsageError("documents are ranked on the CPU (--device cpu)")
        except UsageError as error:
            raise ApiError(str(error), status=501, code="unsupported_endpoint") from None
        prompts = []
        for document in wanted.documents:
            ticket.require()
            with pool.prompt_lock:
                prompt = pool.prompts.open_pair(wanted.query, document)
            prompts.append(prompt.encode())
        scales = self._engine.adapters.scales_of(wanted)
        rows = embed_prompts(
            pool, prompts, ranking.pooling, adapter_scales=scales, require=ticket.require
        )
        scores = find_scores(rows, pool.model.model)[:, 0].tolist()
        n_tokens = sum(map(len, prompts))
        said = wanted.describe(scores, n_tokens, wanted.model or self._settings.model_name)
        return json.dumps(said, separators=(",", ":")).encode(), n_tokens

    def _tokenise(self, given: TextPrompt, ticket: Ticket) -> NDArray[np.int32]:
        ticket.require()
        pool, tokenizer = self._engine.pool, self._engine.tokenizer
        text = given if isinstance(given, str) else join_prompt(given, tokenizer)
        with pool.prompt_lock:
            prompt = pool.prompts.open(text)
        try:
            return prompt.encode()
        except UsageError as error:
            raise ApiError(str(error), param="input") from None

    def _say(
        self, vectors: Sequence[NDArray[np.float32]], wanted: EmbeddingRequest, n_tokens: int
    ) -> dict[str, Any]:
        if wanted.is_base64:
            data = [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in vectors]
        numbers = data if wanted.is_base64 else [each.tolist() for each in vectors]
        encoding = {"encoding_format": "base64"} if wanted.is_base64 else {}
        return {
            "model": wanted.model or self._settings.model_name,
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "data": [
                {"embedding": each, "index": index, "object": "embedding", **encoding}
                for index, each in enumerate(numbers)
            ],
        }


def _say_bare(vectors: Sequence[NDArray[np.float32]]) -> list[dict[str, Any]]:
    """Of every text a list of rows, which pooling makes one."""
    return [
        {"index": index, "embedding": each.reshape(-1, each.shape[-1]).tolist()}
        for index, each in enumerate(vectors)
    ]
