"""Answers and descriptions in the form of llama-server's own interface."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .admission import Place
from .answer_format import AnswerFormat, Chunk, describe_progress, timings
from .events import Finished, Piece, Progress, TokenRecord
from .prompt_fields import resolve_bias

if TYPE_CHECKING:
    from ..sampling_config import SamplingParams
    from ..tokenizer import Tokenizer
    from .api_error import ApiError
    from .fields import Fields
    from .requests import GenerationRequest
    from .server_settings import ServerSettings


class CompletionFormat(AnswerFormat):
    """What ``/completion`` says, whole and in chunks, which no ``[DONE]`` ends.

    ``fields`` are those of its body: ``return_tokens`` and ``response_fields``, names of which only
    the values are said at the end. ``index`` is that of the prompt among several. Raises ApiError
    for fields of another type.
    """

    is_done_said = False

    def __init__(
        self,
        model: str,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        fields: Fields,
        *,
        index: int = 0,
    ) -> None:
        self._model, self._request, self._tokenizer = model, request, tokenizer
        self._returns_tokens = fields.flag("return_tokens") or request.stream
        self._fields = fields.texts("response_fields", MAX_FIELDS)
        self._index = index
        self._n_tokens = 0
        self._has_line_end = False

    def progress(self, progress: Progress) -> Chunk:
        return self._chunk("") | {"prompt_progress": describe_progress(progress)}

    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        text = _text_of([piece])
        self._has_line_end |= "\n" in text
        ids = [] if piece.token_id is None else [piece.token_id]
        self._n_tokens += len(ids)
        if text or ids:
            records = [] if piece.record is None else [piece.record]
            yield self._chunk(text, ids) | self._probabilities(records)

    def _chunk(self, text: str, ids: Sequence[int] = ()) -> Chunk:
        return {
            "index": self._index,
            "content": text,
            "tokens": list(ids),
            "stop": False,
            "id_slot": self.place,
            "tokens_predicted": self._n_tokens,
        }

    def end(self, finished: Finished) -> Iterator[Chunk]:
        yield self._choose(self._last("", [], finished))

    def fail(self, error: ApiError) -> Iterator[Chunk]:
        yield error.to_llama_server_dict()

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        text = _text_of(pieces)
        self._has_line_end = "\n" in text
        ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        records = [piece.record for piece in pieces if piece.record is not None]
        tokens = ids if self._returns_tokens else []
        return self._choose(self._last(text, tokens, finished) | self._probabilities(records))

    def _last(self, text: str, tokens: Sequence[int], finished: Finished) -> Chunk:
        stats, request = finished.stats, self._request
        kind = "word" if finished.stop_text else "eos"
        is_limited = finished.finish_reason == "length"
        most = request.sampling.max_tokens
        return {
            "index": self._index,
            "content": text,
            "tokens": list(tokens),
            "id_slot": self.place,
            "stop": True,
            "model": self._model,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "generation_settings": describe_request(request, self._tokenizer, stats.seed),
            "prompt": finished.prompt,
            "has_new_line": self._has_line_end,
            "truncated": stats.context_shifts + stats.evicted_tokens > 0
            or (is_limited and not 0 <= most <= stats.generated_tokens),
            "stop_type": "limit" if is_limited else kind,
            "stopping_word": finished.stop_text,
            "tokens_cached": stats.cached_tokens,
            "timings": timings(finished.stats),
        }

    def _probabilities(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        if not records:
            return {}
        kind = "prob" if self._request.shows_drawn else "logprob"
        return {
            "completion_probabilities": [
                _token(record.token_id, record.data, record.logprob, kind)
                | {
                    f"top_{kind}s": [
                        _token(token_id, data, value, kind)
                        for token_id, (data, value) in zip(record.top_ids, record.top, strict=True)
                    ]
                }
                for record in records
            ]
        }

    def _choose(self, said: Chunk) -> Chunk:
        """What of it was asked for; "a/b" names b of the object a."""
        if not self._fields:
            return said
        found = ((name, _find(said, name.split("/"))) for name in self._fields)
        return {name: value for name, value in found if value is not _MISSING}


def _find(said: Any, names: Sequence[str]) -> Any:
    for name in names:
        if not isinstance(said, dict) or name not in said:
            return _MISSING
        said = said[name]
    return said


MAX_FIELDS = 64
_MISSING = object()
_SAMPLERS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p"),
    *("repeat_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("adaptive_target", "adaptive_decay"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)


# What clients look for, and is the same for all requests here.
_SAME_FOR_ALL: dict[str, Any] = {
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "deepseek",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "backend_sampling": False,
}


def describe_sampling(
    sampling: SamplingParams, lora: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Of ``generation_settings`` what there is here; ``lora`` as requests have it."""
    return {
        **_SAME_FOR_ALL,
        "seed": -1 if sampling.seed is None else sampling.seed,
        **{name: getattr(sampling, name) for name in _SAMPLERS},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "samplers": list(sampling.samplers),
        "n_predict": sampling.max_tokens,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": [],
        "n_probs": 0,
        "post_sampling_probs": False,
        "grammar": "",
        "stream": False,
        "timings_per_token": False,
        "lora": [{"id": number, "scale": scale} for number, scale in (lora or {}).items()],
    }


def describe_request(request: GenerationRequest, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    """``generation_settings``: how the tokens of an answer were drawn."""
    biases: list[dict[str, Any]] = [
        {"bias": value, "token": token}
        for token, value in resolve_bias(request.bias, tokenizer).items()
    ]
    form = request.grammar
    if request.sampling.ignore_eos and form is None:  # by banning what would end it
        biases += [{"bias": None, "token": token} for token in sorted(tokenizer.eog_ids)]
    return describe_sampling(request.sampling, request.lora) | {
        "seed": seed,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": biases,
        "n_probs": request.top_logprobs or 0,
        "post_sampling_probs": request.shows_drawn,
        "grammar": form.text if form is not None and form.kind == "gbnf" else "",
        "stream": request.stream,
        "timings_per_token": request.wants_timings,
    }


def describe_place(place: Place, n_context: int, *, has_draft: bool) -> dict[str, Any]:
    """A slot: one of the places at which requests are answered; nothing of what they say."""
    said: dict[str, Any] = {
        "id": place.number,
        "id_task": place.n_request,
        "n_ctx": n_context,
        "speculative": has_draft,
        "is_processing": place.ticket is not None,
    }
    if place.ticket is not None:
        n_decoded, most = place.ticket.n_generated, place.ticket.most_tokens
        left = -1 if most < 0 else most - n_decoded
        said["next_token"] = [
            {"n_decoded": n_decoded, "n_remain": left, "has_next_token": left != 0}
        ]
    return said


def describe_server(
    settings: ServerSettings, tokenizer: Tokenizer, template: object, *, n_context: int
) -> dict[str, Any]:
    """What clients look for in ``/props``."""
    defaults = describe_sampling(settings.sampling)
    return {
        "default_generation_settings": {"n_ctx": n_context, "params": defaults},
        "total_slots": settings.parallel,
        "model_alias": settings.model_name,
        "model_path": settings.model_path,
        "chat_template": template if isinstance(template, str) else "",
        "bos_token": tokenizer.bos_text,
        "eos_token": tokenizer.eos_text,
        "modalities": {"vision": False, "audio": False, "video": False},
        "endpoint_slots": True,
        "endpoint_metrics": True,
        "endpoint_props": False,  # that changes them
        "is_sleeping": False,
        "build_info": f"edgeh2o-{__version__}",
    }


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(segment.text for piece in pieces for segment in piece.segments)


def _token(token_id: int, data: bytes, logprob: float, kind: str) -> dict[str, Any]:
    text = data.decode("utf-8", errors="ignore")
    value = math.exp(logprob) if kind == "prob" else max(logprob, -9999.0)
    return {"id": token_id, "token": text, "bytes": list(data), kind: value}
