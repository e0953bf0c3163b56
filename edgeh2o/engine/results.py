"""What a generation gives at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .stats import GenerationStats

FinishReason = Literal["stop", "length", "interrupted"]


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
