"""What prompts lose that are read by the budgets, under the guard: a measurement of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..option_fields import MAX_CONTEXT
from .budget_points import SHOWN_LENGTH, budget_of_length
from .decode_quality import PLAIN_KINDS
from .divergences import read_divergences

# What a default run may lose, in percent: on the mean of all kinds of text, and on any of them by
# what its windows can tell.
DEFAULT_MAX_LOSS = 0.5
_SURE_ERRORS = 2
# Highest mean KL divergence from a dense prefill, in nats. SmolLM2-135M with 1,024 keys of its KV
# heads, which loses 0.6 % at most: 3.3e-3 and 5.6e-3; Qwen2.5-Coder-0.5B where pairs lose 4.5 %:
# 18e-3.
PLAIN_LIMIT = 4e-3
LOOK_UP_LIMIT = 8e-3


def kl_limit(kind: str) -> float:
    """The highest mean KL divergence of a kind of text that is harmless, in nats."""
    return PLAIN_LIMIT if kind in PLAIN_KINDS else LOOK_UP_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillQuality:
    """What prompts of ``length`` tokens lose by a mean ``budget``, against dense prefills.

    By kind of text: ``loss`` is in percent of the perplexity and ``loss_error`` its standard error
    over tokens; ``kl`` is the mean KL(dense || sparse), in nats. Under the guard of a default run.
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
    def from_dict(cls, data: Any) -> PrefillQuality:
        """What ``to_dict`` gave. Raises ValueError for what cannot have been."""
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
        budget, length = int(data["budget"]), int(data["length"])
        if not (0 < budget <= MAX_CONTEXT and 0 < length <= MAX_CONTEXT):
            raise ValueError("keys and tokens of a measurement of prefill must be positive")
        return cls(budget=budget, length=length, loss=loss, loss_error=error, kl=kl)


def read_qualities(data: Any, table_length: int) -> tuple[PrefillQuality, ...]:
    """What was measured at each length, by a table's entry; its texts have ``table_length`` tokens.

    Earlier tables have one, of a budget that grows by half for every doubling of the prompt up to
    its length. Raises ValueError for what cannot have been.
    """
    if data is None:
        return ()
    if not isinstance(data, list):
        one, shown = PrefillQuality.from_dict(data), max(SHOWN_LENGTH, table_length)
        if one.length <= shown:
            return (one,)
        grown = budget_of_length(((shown, one.budget),), one.length)
        return replace(one, length=shown), replace(one, budget=grown)
    qualities = tuple(map(PrefillQuality.from_dict, data))
    for shorter, longer in pairwise(qualities):
        if shorter.length >= longer.length or shorter.budget > longer.budget:
            raise ValueError("measurements of prefill must ascend in length, and in keys")
    return qualities
