"""What prompts lose whose attention multiplies in 8 bits: a measurement of a budget table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .divergences import read_divergences

# Mean KL divergence from products in f32, in nats, and loss of all texts in percent, that go
# unnoticed. Twice as much on texts that look things up, as for what is left out
# (prefill_quality.py, decode_quality.py); what both lose together is measured on top.
KL_LIMIT = 1e-3
LOOK_UP_KL_LIMIT = 2e-3
LOOK_UP_TEXTS = ("facts", "pairs", "table")
LOSS_LIMIT = 0.1
# What outputs of attention may be off by, in percent, where losses were not measured: SmolLM2-135M
# with 1.4 to 1.7, by the prompt, and Qwen2.5-Coder-0.5B with 1.1 to 1.4 keep these limits, and in
# F16 Gemma 3 270M with 1.5 to 1.8. With 2.3 to 3.1, its keys not evened out, it lost 0.35 %.
ERROR_LIMIT = 1.9


def rounding_limit(text: str) -> float:
    """The highest mean KL divergence of a text that is harmless, in nats."""
    return LOOK_UP_KL_LIMIT if text in LOOK_UP_TEXTS else KL_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingQuality:
    """Mean KL(exact || rounded) by text, in nats, and the mean loss of all texts in percent.

    Of prompts of ``length`` tokens that read everything; of several lengths the highest.
    """

    length: int
    kl: Mapping[str, float]
    loss: float

    @property
    def is_harmless(self) -> bool:
        """Whether long prompts may be read so by default."""
        return self.loss <= LOSS_LIMIT and all(
            kl <= rounding_limit(text) for text, kl in self.kl.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {"length": self.length, "kl": dict(self.kl), "loss": self.loss}

    @classmethod
    def from_dict(cls, data: Any) -> RoundingQuality | None:
        """What ``to_dict`` gave, None for None. Raises ValueError for what cannot have been."""
        if data is None:
            return None
        kl = read_divergences(data, "rounding")
        loss = float(data["loss"])
        if not all(0 <= value < math.inf for value in (*kl.values(), abs(loss))):
            raise ValueError("divergences and losses must be finite, and the former not negative")
        return cls(length=int(data["length"]), kl=kl, loss=loss)
