"""Answers in the form of Anthropic's Messages API, whole and as the events of a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from .answer_format import AnswerFormat, Chunk
from .answer_parts import Part, PartSequence, Step
from .api_error import ApiError
from .events import Finished, Piece, Progress

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


class MessagesFormat(AnswerFormat):
    """``message``, and the events that make one."""

    is_done_said = False
    is_named = True
    heartbeat: ClassVar[Chunk | None] = {"type": "ping"}

    def __init__(self, model: str) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._sequence = PartSequence()

    def begin_reading(self, progress: Progress) -> Iterator[Chunk]:
        usage = _usage(progress.total, progress.cached, 0)
        yield {"type": "message_start", "message": self._message([], {"usage": usage})}

    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        for step in self._sequence.take(piece):
            yield _event(step)

    def end(self, finished: Finished) -> Iterator[Chunk]:
        for step in self._sequence.finish():
            yield _event(step)
        said = _end_of(finished)
        usage = said.pop("usage")
        yield {"type": "message_delta", "delta": said, "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Chunk]:
        yield error.to_anthropic_dict()

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        content = [_block(part, is_whole=True) for part in self._sequence.collect(pieces)]
        return self._message(content, _end_of(finished))

    def _message(self, content: list[Chunk], end: Mapping[str, Any]) -> Chunk:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **end,
        }


def _end_of(finished: Finished) -> dict[str, Any]:
    stats, is_stopped = finished.stats, finished.finish_reason == "stop"
    stop_text = finished.stop_text if is_stopped and finished.stop_text else None
    natural = "end_turn" if stop_text is None else "stop_sequence"
    n_new = stats.prompt_tokens - stats.cached_tokens
    return {
        "stop_reason": _REASONS.get(finished.finish_reason, natural),
        "stop_sequence": stop_text,
        "usage": _usage(n_new, stats.cached_tokens, stats.generated_tokens),
    }


def _usage(n_read: int, n_cached: int, n_generated: int) -> dict[str, int]:
    """What is kept for others costs nothing, and is not said."""
    return {
        "input_tokens": n_read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_generated,
    }


def _event(step: Step) -> Chunk:
    part = step.part
    if step.what == "begin":
        block = _block(part, is_whole=False)
        return {"type": "content_block_start", "index": part.index, "content_block": block}
    if step.what == "end":
        return {"type": "content_block_stop", "index": part.index}
    if part.kind == "call":
        delta = {"type": "input_json_delta", "partial_json": step.text}
    elif part.kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": step.text}
    else:
        delta = {"type": "text_delta", "text": step.text}
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: Part, *, is_whole: bool) -> Chunk:
    """A part, whole or as it begins."""
    text = part.text if is_whole else ""
    if part.call is not None:
        arguments = _object_of(text)
        identity = {"id": f"toolu_{part.number}", "name": part.call.name}
        return {"type": "tool_use", **identity, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _object_of(arguments: str) -> dict[str, Any]:
    """An object: an empty one where the arguments are none, or were cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
