"""What a generation gives: chunks while it runs, the whole at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from .access import ExclusiveAccess
from .generate import FinishReason, Generation, Token
from .stats import GenerationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """One token of a streamed answer, with the counters so far.

    ``text`` may be empty while a character or a possible stop text is incomplete; the texts of
    all chunks joined are the answer. ``finish_reason`` is set on the last chunk.
    """

    text: str
    token_id: int
    logprob: float | None
    prompt_tokens: int
    prefill_tps: float | None
    generated_tokens: int
    decode_tps: float | None
    finish_reason: FinishReason | None


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
        self._tokens: Generator[Token, None, None] = iter(generation)
        self._is_over = False
        self._logprobs: list[float] = []
        if access is not None:
            access.open(self)

    def __next__(self) -> GenerationChunk:
        with nullcontext() if self._access is None else self._access.step(self):
            token = self._next_token()
        if token is None:
            raise StopIteration
        return self._chunk(token)

    def close(self) -> None:
        """Ends the answer where it is; other threads may use the model, ``result`` stays."""
        with nullcontext() if self._access is None else self._access.step(self):
            self._tokens.close()
            self._end()

    def _next_token(self) -> Token | None:
        token = None
        try:
            if not self._is_over:
                self._resume(self._generation)
                token = next(self._tokens, None)
        finally:
            if token is None or token.finish_reason is not None:
                self._end()
        return token

    def _end(self) -> None:
        self._is_over = True
        if self._access is not None:
            self._access.close(self)

    def _chunk(self, token: Token) -> GenerationChunk:
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        generation = self._generation
        return GenerationChunk(
            text=token.text,
            token_id=token.id,
            logprob=token.logprob,
            prompt_tokens=generation.n_prompt_tokens,
            prefill_tps=generation.prefill_tps,
            generated_tokens=len(generation.token_ids),
            decode_tps=generation.decode_tps,
            finish_reason=token.finish_reason,
        )

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
