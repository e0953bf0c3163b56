"""What generated tokens lose that read what the budgets hold: a measurement of a budget table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..option_fields import MAX_CONTEXT, is_int
from .divergences import read_divergences

# Highest mean KL divergence from dense decode, in nats, that goes unnoticed: two dense prefills in
# chunks of other sizes differ by 2.9e-3 on SmolLM2-135M Q4_1. Where an answer copies a span or
# looks a key up, rules that lose it differ by hundreds of times as much.
PLAIN_LIMIT = 3e-3
LOOK_UP_LIMIT = 6e-3
PLAIN_KINDS = ("prose", "code", "dialogue")


def kl_limit(kind: str) -> float:
    """The highest mean KL divergence of a kind of text that goes unnoticed, in nats."""
    return PLAIN_LIMIT if kind in PLAIN_KINDS else LOOK_UP_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeQuality:
    """Mean KL(dense || headwise) of decoded tokens, in nats, by kind of text.

    Measured with the mean ``budget`` of KV heads after prompts of up to ``length`` tokens; of
    several lengths the highest of every kind. ``heads`` are the budgets of every layer's KV heads,
    None for the whole past, where others were measured than the table's: those of heads that have
    one are ``budget`` keys then, whatever the prompt.
    """

    budget: int
    length: int
    kl: Mapping[str, float]
    heads: tuple[int | None, ...] | None = None

    @property
    def is_harmless(self) -> bool:
        """Whether decode by the budget goes unnoticed on every kind of text."""
        return all(kl <= kl_limit(kind) for kind, kl in self.kl.items())

    def joined(self, shorter: DecodeQuality) -> DecodeQuality:
        """The quality of both lengths: of each kind of text the highest divergence."""
        kl = {kind: max(value, self.kl.get(kind, 0.0)) for kind, value in shorter.kl.items()}
        return replace(self, kl={**self.kl, **kl})

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        data = {"budget": self.budget, "length": self.length, "kl": dict(self.kl)}
        return data if self.heads is None else {**data, "heads": list(self.heads)}

    @classmethod
    def from_dict(cls, data: Any) -> DecodeQuality | None:
        """What ``to_dict`` gave, None for None. Raises ValueError for what cannot have been."""
        if data is None:
            return None
        kl = read_divergences(data, "decode")
        if not all(0 <= value < math.inf for value in kl.values()):
            raise ValueError("divergences must be finite and not negative")
        heads = data.get("heads")
        if heads is not None and not (isinstance(heads, list) and all(map(_is_budget, heads))):
            raise ValueError("budgets of decode must be positive, or null for the whole past")
        return cls(
            budget=int(data["budget"]),
            length=int(data["length"]),
            kl=kl,
            heads=None if heads is None else tuple(heads),
        )


def _is_budget(value: Any) -> bool:
    return value is None or (is_int(value) and 0 < value <= MAX_CONTEXT)
