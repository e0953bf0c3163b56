"""What a generation gives: chunks while it runs, the whole at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .generate import FinishReason
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
    """A whole answer. ``token_ids`` includes the end-of-generation token when there was one."""

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
