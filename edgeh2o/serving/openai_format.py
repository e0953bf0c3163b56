"""Answers in the form of OpenAI's interface: whole, and as the chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from .._version import __version__
from .answer_format import AnswerFormat, Chunk, describe_progress, timings
from .events import Finished, Piece, Progress, TokenRecord
from .segment import Segment, join_calls
from .tools import ToolCall

if TYPE_CHECKING:
    from ..engine.stats import GenerationStats

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class WholeObject:
    """What the answers to one request have in common, of which each is a choice.

    Those of a prompt follow each other, ``n_of_prompt`` (default: all), and it counts once in the
    usage.
    """

    def __init__(self, n_answers: int = 1, n_of_prompt: int | None = None) -> None:
        self.n_answers, self._n_of_prompt = n_answers, n_of_prompt or n_answers
        self.number = secrets.token_hex(12)
        self.created = int(time.time())
        self._usages: dict[int, Mapping[str, Any]] = {}

    def add_usage(self, index: int, stats: GenerationStats) -> Mapping[str, Any] | None:
        """What all have cost, once the last of them is known."""
        self._usages[index] = _usage_of(stats)
        return self._usage() if len(self._usages) == self.n_answers else None

    def _usage(self) -> Mapping[str, Any]:
        usages = [self._usages[index] for index in range(self.n_answers)]
        firsts = usages[:: self._n_of_prompt]
        n_read = sum(each["prompt_tokens"] for each in firsts)
        n_written = sum(each["completion_tokens"] for each in usages)
        usage = dict(zip(_COUNTS, (n_read, n_written, n_read + n_written), strict=True))
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in firsts)
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def join(self, answers: Sequence[Chunk]) -> Chunk:
        """One object of those of all, which were told whole."""
        said = {name: value for name, value in answers[0].items() if name != "timings"}
        choices = [choice for each in answers for choice in each["choices"]]
        return said | {"choices": choices, "usage": self._usage()}


class _OpenAIFormat(AnswerFormat):
    """One answer: the ``index``-th choice ``of`` an object, and what has been said of it so far.

    ``verbose`` says the same as llama-server's own interface does, for whoever looks for errors.
    """

    verbose: AnswerFormat | None = None
    ends_with_usage = False  # of a stream, whether or not it is asked for
    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        of: WholeObject | None = None,
        index: int = 0,
        *,
        include_usage: bool = False,
    ) -> None:
        self._model, self._of, self._index = model, of or WholeObject(), index
        self._include_usage = include_usage

    def _envelope(self, kind: str, choices: list[Any]) -> Chunk:
        return {
            "id": f"{self.prefix}-{self._of.number}",
            "object": kind,
            "created": self._of.created,
            "model": self._model,
            "system_fingerprint": f"edgeh2o-{__version__}",
            "choices": choices,
        }

    def chunk(self, choice: Mapping[str, Any] | None) -> Chunk:
        """A chunk with one choice, or with none: that of the usage or the progress."""
        chunk = self._envelope(self.chunk_object, [] if choice is None else [dict(choice)])
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def progress(self, progress: Progress) -> Chunk:
        return self.chunk(None) | {"prompt_progress": describe_progress(progress)}

    def end(self, finished: Finished) -> Iterator[Chunk]:
        cost = {"timings": timings(finished.stats)}
        more = {} if self.verbose is None else {"__verbose": next(self.verbose.end(finished))}
        usage = self._of.add_usage(self._index, finished.stats)
        if self.ends_with_usage and not self._include_usage and usage is not None:
            more["usage"] = dict(usage)
        yield self.chunk(self._last_choice(finished.finish_reason)) | cost | more
        if self._include_usage and usage is not None:  # the times are those of one answer
            is_alone = self._of.n_answers == 1
            yield self.chunk(None) | {"usage": usage} | (cost if is_alone else {})

    def _choice(
        self,
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        **content: Any,
    ) -> dict[str, Any]:
        said = {"index": self._index, **content}
        return said | {"logprobs": logprobs, "finish_reason": finish_reason}

    @abstractmethod
    def _last_choice(self, finish_reason: str) -> Mapping[str, Any]: ...

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        segments = [segment for piece in pieces for segment in piece.segments]
        records = [piece.record for piece in pieces if piece.record is not None]
        choice = self._whole_choice(segments, records, finished.finish_reason)
        said = self._envelope(self.whole_object, [choice]) | {
            "usage": self._of.add_usage(self._index, finished.stats),
            "timings": timings(finished.stats),
        }
        if self.verbose is not None:
            said["__verbose"] = self.verbose.whole(pieces, finished)
        return said

    @abstractmethod
    def _whole_choice(
        self, segments: Sequence[Segment], records: Sequence[TokenRecord], finish_reason: str
    ) -> Mapping[str, Any]: ...


class ChatFormat(_OpenAIFormat):
    """``chat.completion`` and its chunks."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._n_calls = 0

    def begin(self) -> Iterator[Chunk]:
        yield self.chunk(self._choice(delta={"role": "assistant", "content": ""}))

    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        logprobs = _chat_logprobs([piece.record]) if piece.record is not None else None
        for segment in piece.segments:
            for delta in self._deltas(segment):
                yield self.chunk(self._choice(delta=delta, logprobs=logprobs))
                logprobs = None
        if logprobs is not None:  # of a token whose text is not certain yet
            yield self.chunk(self._choice(delta={"content": ""}, logprobs=logprobs))

    def _deltas(self, segment: Segment) -> Iterator[dict[str, Any]]:
        if segment.call is None:
            name = "content" if segment.kind == "text" else "reasoning_content"
            yield {name: segment.text}
            return
        if not segment.goes_on:
            begun = ToolCall(segment.call.name, "").to_dict()
            yield {"tool_calls": [{"index": self._n_calls, **begun}]}
            self._n_calls += 1
        if arguments := segment.call.arguments:
            more = {"index": self._n_calls - 1, "function": {"arguments": arguments}}
            yield {"tool_calls": [more]}

    def _last_choice(self, finish_reason: str) -> Mapping[str, Any]:
        return self._choice(delta={}, finish_reason=finish_reason)

    def _whole_choice(
        self, segments: Sequence[Segment], records: Sequence[TokenRecord], finish_reason: str
    ) -> Mapping[str, Any]:
        calls = [call.to_dict() for call in join_calls(segments)]
        text = _join(segments, "text")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts := _join(segments, "reasoning"):
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
            message["content"] = text.strip() or None
        return self._choice(
            message=message,
            logprobs=_chat_logprobs(records) if records else None,
            finish_reason=finish_reason,
        )


class TextFormat(_OpenAIFormat):
    """``text_completion``, whole and in chunks."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    ends_with_usage = True  # as of llama-server

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._n_characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # as that of the text

    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        text = _join(piece.segments, "text")
        records = [piece.record] if piece.record is not None else []
        if text or records:
            yield self.chunk(self._choice(text=text, logprobs=self._logprobs(records)))

    def _last_choice(self, finish_reason: str) -> Mapping[str, Any]:
        return self._choice(text="", finish_reason=finish_reason)

    def _whole_choice(
        self, segments: Sequence[Segment], records: Sequence[TokenRecord], finish_reason: str
    ) -> Mapping[str, Any]:
        text = _join(segments, "text")
        return self._choice(
            text=text, logprobs=self._logprobs(records), finish_reason=finish_reason
        )

    def _logprobs(self, records: Sequence[TokenRecord]) -> dict[str, Any] | None:
        if not records:
            return None
        offsets = []
        for record in records:
            offsets.append(self._n_characters)
            if record.is_text:
                self._n_characters += len(self._utf8.decode(record.data))
        return {
            "tokens": [_name(record.data) for record in records],
            "token_logprobs": [None if isnan(r.logprob) else r.logprob for r in records],
            "top_logprobs": [
                None if isnan(r.logprob) else {_name(data): value for data, value in r.top}
                for r in records
            ],
            "text_offset": offsets,
            # As llama-server has them.
            "content": _list_tokens([r for r in records if not isnan(r.logprob)]),
        }


def _usage_of(stats: GenerationStats) -> Mapping[str, Any]:
    """The object ``usage`` of an answer."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def _join(segments: Sequence[Segment], kind: str) -> str:
    return "".join(segment.text for segment in segments if segment.kind == kind)


def _chat_logprobs(records: Sequence[TokenRecord]) -> dict[str, Any]:
    return {"content": _list_tokens(records), "refusal": None}


def _list_tokens(records: Sequence[TokenRecord]) -> list[dict[str, Any]]:
    return [
        _token(record.token_id, record.data, record.logprob)
        | {
            "top_logprobs": [
                _token(token_id, data, value)
                for token_id, (data, value) in zip(record.top_ids, record.top, strict=True)
            ]
        }
        for record in records
    ]


def _token(token_id: int, data: bytes, logprob: float) -> dict[str, Any]:
    """With the ``id`` as llama-server has it."""
    said = {"token": _decode(data), "logprob": max(logprob, -9999.0), "bytes": list(data)}
    return {"id": token_id, **said}


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _name(data: bytes) -> str:
    """A token's text; of a part of a character its bytes, so that each has a name of its own."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
