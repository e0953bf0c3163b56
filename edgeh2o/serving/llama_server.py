"""Answers and descriptions in the form of llama-server's own interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._version import __version__
from ..sampling_config import SamplingParams
from .admission import Place
from .answer_format import AnswerFormat, Chunk, describe_progress, timings
from .answers import Finished, Piece, Progress, TokenRecord
from .requests import GenerationRequest


class CompletionFormat(AnswerFormat):
    """What ``/completion`` says, whole and in chunks, which no ``[DONE]`` ends."""

    is_done_said = False

    def __init__(self, model: str, request: GenerationRequest, *, returns_tokens: bool) -> None:
        self._model, self._request = model, request
        self._returns_tokens = returns_tokens or request.stream
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
            yield self._chunk(text, ids) | _probabilities(records)

    def _chunk(self, text: str, ids: Sequence[int] = ()) -> Chunk:
        return {
            "index": 0,
            "content": text,
            "tokens": list(ids),
            "stop": False,
            "id_slot": self.place,
            "tokens_predicted": self._n_tokens,
        }

    def end(self, finished: Finished) -> Iterator[Chunk]:
        yield self._last("", [], finished)

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        text = _text_of(pieces)
        self._has_line_end = "\n" in text
        ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        records = [piece.record for piece in pieces if piece.record is not None]
        tokens = ids if self._returns_tokens else []
        return self._last(text, tokens, finished) | _probabilities(records)

    def _last(self, text: str, tokens: Sequence[int], finished: Finished) -> Chunk:
        stats, prompt = finished.stats, self._request.prompt
        kind = "word" if finished.stop_text else "eos"
        return {
            "index": 0,
            "content": text,
            "tokens": list(tokens),
            "id_slot": self.place,
            "stop": True,
            "model": self._model,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "generation_settings": describe_sampling(self._request.sampling, self._request.lora),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "has_new_line": self._has_line_end,
            "truncated": stats.context_shifts + stats.evicted_tokens > 0,
            "stop_type": "limit" if finished.finish_reason == "length" else kind,
            "stopping_word": finished.stop_text,
            "tokens_cached": stats.cached_tokens,
            "timings": timings(finished),
        }


_SAMPLERS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p"),
    *("repeat_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)


def describe_sampling(
    sampling: SamplingParams, lora: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Of ``generation_settings`` what there is here; ``lora`` as requests have it."""
    return {
        "seed": -1 if sampling.seed is None else sampling.seed,
        **{name: getattr(sampling, name) for name in _SAMPLERS},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "samplers": list(sampling.samplers),
        "n_predict": sampling.max_tokens,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "lora": [{"id": number, "scale": scale} for number, scale in (lora or {}).items()],
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
    *, model: str, n_context: int, n_slots: int, template: object, defaults: SamplingParams
) -> dict[str, Any]:
    """What clients look for in ``/props``."""
    return {
        "default_generation_settings": {"n_ctx": n_context, "params": describe_sampling(defaults)},
        "total_slots": n_slots,
        "model_alias": model,
        "chat_template": template if isinstance(template, str) else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"edgeh2o-{__version__}",
    }


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(segment.text for piece in pieces for segment in piece.segments)


def _probabilities(records: Sequence[TokenRecord]) -> dict[str, Any]:
    if not records:
        return {}
    return {
        "completion_probabilities": [
            _token(record.token_id, record.data, record.logprob)
            | {
                "top_logprobs": [
                    _token(token_id, data, value)
                    for token_id, (data, value) in zip(record.top_ids, record.top, strict=True)
                ]
            }
            for record in records
        ]
    }


def _token(token_id: int, data: bytes, logprob: float) -> dict[str, Any]:
    text = data.decode("utf-8", errors="ignore")
    return {"id": token_id, "token": text, "bytes": list(data), "logprob": max(logprob, -9999.0)}
