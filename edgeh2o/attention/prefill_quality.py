"""What prompts lose that are read by the budgets, under the guard: a measurement of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .decode_quality import PLAIN_KINDS
from .divergences import read_divergences

# What a default run may lose, in percent: on the mean of all kinds of text, and on any of them by
# what its windows can tell.
DEFAULT_MAX_LOSS = 0.5
_SURE_ERRORS = 2
# Highest mean KL divergence from a dense prefill, in nats. SmolLM2-135M with 1,024 keys, which
# loses 0.6 % at most: 3.3e-3 and 5.6e-3; Qwen2.5-Coder-0.5B where pairs lose 4.5 %: 18e-3.
PLAIN_LIMIT = 4e-3
LOOK_UP_LIMIT = 8e-3


def kl_limit(kind: str) -> float:
    """The highest mean KL divergence of a kind of text that is harmless, in nats."""
    return PLAIN_LIMIT if kind in PLAIN_KINDS else LOOK_UP_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillQuality:
    """What the mean ``budget`` loses against dense prefills, by kind of text.

    ``loss`` is in percent of the perplexity and ``loss_error`` its standard error over tokens;
    ``kl`` is the mean KL(dense || sparse), in nats. Of prompts of up to ``length`` tokens, under
    the guard of a default run; of several lengths the worst of every kind.
    """

    budget: int
    length: int
    loss: Mapping[str, float]
    loss_error: Mapping[str, float]
    kl: Mapping[str, float]

    @property
    def is_harmless(self) -> bool:
        """Whether prompts may be read so by default."""
        is_small = sum(self.loss.values()) <= DEFAULT_MAX_LOSS * len(self.loss)
        return is_small and not self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether a kind of text alone loses too much, whatever others do."""
        return any(
            loss - _SURE_ERRORS * self.loss_error[kind] > DEFAULT_MAX_LOSS
            for kind, loss in self.loss.items()
        ) or any(kl > kl_limit(kind) for kind, kl in self.kl.items())

    def joined(self, longer: PrefillQuality) -> PrefillQuality:
        """The worst of both of every kind, with the length of the other."""
        losses, errors, divergences = dict(self.loss), dict(self.loss_error), dict(self.kl)
        for kind, loss in longer.loss.items():
            if kind not in losses or loss > losses[kind]:
                losses[kind], errors[kind] = loss, longer.loss_error[kind]
            divergences[kind] = max(longer.kl[kind], divergences.get(kind, 0.0))
        return PrefillQuality(
            budget=self.budget,
            length=longer.length,
            loss=losses,
            loss_error=errors,
            kl=divergences,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "budget": self.budget,
            "length": self.length,
            "loss": dict(self.loss),
            "loss_error": dict(self.loss_error),
            "kl": dict(self.kl),
        }

    @classmethod
    def from_dict(cls, data: Any) -> PrefillQuality | None:
        """What ``to_dict`` gave, None for None. Raises ValueError for what cannot have been."""
        if data is None:
            return None
        kl = read_divergences(data, "prefill")
        loss, error = (
            {str(kind): float(value) for kind, value in dict(data[name]).items()}
            for name in ("loss", "loss_error")
        )
        if not kl.keys() == loss.keys() == error.keys():
            raise ValueError("its measurement of prefill has other texts for losses and KL")
        least = [*kl.values(), *error.values(), *map(abs, loss.values())]
        if not all(0 <= value < math.inf for value in least):
            raise ValueError("divergences and losses must be finite, and the former not negative")
        return cls(
            budget=int(data["budget"]),
            length=int(data["length"]),
            loss=loss,
            loss_error=error,
            kl=kl,
        )
