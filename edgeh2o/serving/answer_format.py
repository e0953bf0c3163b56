"""What all forms of answers have in common: when each part is said, and what it cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .api_error import ApiError
from .events import Finished, Piece, Progress

if TYPE_CHECKING:
    from ..engine.stats import GenerationStats

Chunk = dict[str, Any]


class AnswerFormat(ABC):
    """One answer, said whole or as the chunks of a stream.

    ``is_done_said``: whether ``[DONE]`` ends the stream; ``is_named``: whether its events are named
    by the "type" of their chunks. ``heartbeat`` says that the stream goes on, by a comment if it is
    none. ``place`` is where it is answered, once that is known.
    """

    is_done_said = True
    is_named = False
    heartbeat: ClassVar[Chunk | None] = None
    place = -1

    def begin(self) -> Iterator[Chunk]:
        """The first chunks of a stream."""
        yield from ()

    def begin_reading(self, progress: Progress) -> Iterator[Chunk]:
        """The chunks of a stream once the request is at work, and what is cached is known."""
        yield from ()

    def progress(self, progress: Progress) -> Chunk | None:
        """What of the prompt is read; None where only a heartbeat says so."""
        return None

    @abstractmethod
    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        """The chunks of what has become certain."""

    @abstractmethod
    def end(self, finished: Finished) -> Iterator[Chunk]:
        """The last chunks."""

    def fail(self, error: ApiError) -> Iterator[Chunk]:
        """The last chunks of a stream that ends by an error."""
        yield error.to_dict()

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        """The answer in one object."""


def describe_progress(progress: Progress) -> dict[str, Any]:
    """As llama-server does: cached tokens count as read."""
    return {
        "total": progress.total + progress.cached,
        "cache": progress.cached,
        "processed": progress.done + progress.cached,
        "time_ms": round(progress.elapsed_s * 1e3),
    }


def reading_timings(progress: Progress) -> dict[str, Any]:
    """As ``timings``, while the prompt is read."""
    n_read, seconds = progress.done, progress.elapsed_s
    is_measured = n_read > 0 and seconds > 0
    return {
        "cache_n": progress.cached,
        "prompt_n": n_read,
        "prompt_ms": seconds * 1e3 if n_read else 0.0,
        "prompt_per_token_ms": seconds * 1e3 / n_read if is_measured else 0.0,
        "prompt_per_second": n_read / seconds if is_measured else 0.0,
        **dict.fromkeys(("predicted_n", "predicted_ms"), 0),
        **dict.fromkeys(("predicted_per_token_ms", "predicted_per_second"), 0.0),
    }


def timings(stats: GenerationStats) -> dict[str, Any]:
    """Rates and times of an answer by the names of llama-server, and two of its own.

    A rate that was not measured is 0; the first token counts with the prompt.
    """
    prompt_tps, decode_tps = stats.prefill_tps or 0.0, stats.decode_tps or 0.0
    said: dict[str, Any] = {
        "cache_n": stats.cached_tokens,
        "prompt_n": stats.prompt_tokens - stats.cached_tokens,
        "prompt_ms": stats.prefill_s * 1e3,
        "prompt_per_token_ms": 1e3 / prompt_tps if prompt_tps else 0.0,
        "prompt_per_second": prompt_tps,
        "predicted_n": stats.generated_tokens,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_token_ms": 1e3 / decode_tps if decode_tps else 0.0,
        "predicted_per_second": decode_tps,
        "time_to_first_token_s": stats.ttft_s,
    }
    if stats.note:
        said["note"] = stats.note
    if stats.drafted_tokens:
        said |= {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens}
    return said
