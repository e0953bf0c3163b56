"""What a generation gives: chunks while it runs, the whole at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from .access import ExclusiveAccess
from .generate import FinishReason, Generation, GenerationChunk
from .stats import GenerationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A whole answer.

    ``token_ids`` includes the end-of-generation token when there was one, but no token whose whole
    text was cut away with a stop text; one that a stop text cuts in two stays. ``logprobs`` has an
    entry for each. ``stats`` counts all that were generated.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    stats: GenerationStats

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping of plain values, fit for JSON."""
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
        }
        if self.logprobs is not None:
            fields["logprobs"] = list(self.logprobs)
        return fields | self.stats.to_dict()


class GenerationStream(Iterator[GenerationChunk]):
    """Chunks of one answer. ``result`` gives the whole of what was generated so far.

    ``resume(generation)`` is called before every token, and raises if it must not go on. Other
    threads are refused until the end, ``close`` or the last reference; without ``access`` whoever
    made the stream keeps them out.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        resume: Callable[[Generation], None],
        make_stats: Callable[[Generation], GenerationStats],
        access: ExclusiveAccess | None = None,
    ) -> None:
        self._generation = generation
        self._resume = resume
        self._make_stats = make_stats
        self._access = access
        self._chunks: Generator[GenerationChunk, None, None] = iter(generation)
        self._is_over = False
        self._logprobs: list[float] = []
        if access is not None:
            access.open(self)

    def __next__(self) -> GenerationChunk:
        with nullcontext() if self._access is None else self._access.step(self):
            chunk = self._next_chunk()
        if chunk is None:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Ends the answer where it is; other threads may use the model, ``result`` stays."""
        with nullcontext() if self._access is None else self._access.step(self):
            self._chunks.close()
            self._end()

    def _next_chunk(self) -> GenerationChunk | None:
        chunk = None
        try:
            if not self._is_over:
                self._resume(self._generation)
                chunk = next(self._chunks, None)
        finally:
            if chunk is None or chunk.finish_reason is not None:
                self._end()
        if chunk is not None and chunk.logprob is not None:
            self._logprobs.append(chunk.logprob)
        return chunk

    def _end(self) -> None:
        self._is_over = True
        if self._access is not None:
            self._access.close(self)

    def finish(self) -> GenerationResult:
        """Reads the stream to its end; returns the whole answer."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> GenerationResult:
        """Text, tokens and statistics so far; complete once the stream has ended."""
        generation = self._generation
        return GenerationResult(
            text=generation.text,
            token_ids=tuple(generation.token_ids[: generation.n_said]),
            logprobs=tuple(self._logprobs[: generation.n_said]) if self._logprobs else None,
            finish_reason=generation.finish_reason,
            stats=self._make_stats(generation),
        )
