"""Mixtures of experts: how many there are, how wide they are, and how a token's are weighted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import FormatError
from .keys import ArchitectureKeys

COUNT_KEY = "expert_count"
SHARED_KEY = "expert_shared_feed_forward_length"
MAX_WIDTH = 2**20
MAX_EXPERTS = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """What an architecture assumes of its experts.

    Attributes:
        has_own_width: the width of an expert has a key of its own; else it is that of all.
        is_normalised: the weights of a token's experts are divided by their sum.
        shared: an expert that every token goes through beside its own: never, where the file gives
            its width, or always, with a gate.
    """

    has_own_width: bool = True
    is_normalised: bool = True
    shared: Literal["none", "optional", "gated"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSizes:
    """Experts, experts of a token, the width of every layer's networks and of the shared expert."""

    n_experts: int
    n_experts_used: int
    ffn_dims: tuple[int, ...]
    shared_ffn_dim: int = 0


def read_feed_forward(keys: ArchitectureKeys, rule: ExpertRule | None) -> FeedForwardSizes:
    """Raises ``FormatError`` that names the key; a rule of None is a family without experts."""
    if rule is None:
        _refuse_experts(keys)
        widths = keys.integers("feed_forward_length", maximum=MAX_WIDTH)
        return FeedForwardSizes(n_experts=0, n_experts_used=0, ffn_dims=widths)
    n_experts = keys.integer(COUNT_KEY, maximum=MAX_EXPERTS)
    n_used = keys.integer("expert_used_count", maximum=n_experts)
    if not rule.has_own_width:
        width = keys.integer("feed_forward_length", maximum=MAX_WIDTH)
    elif keys.has("expert_feed_forward_length"):
        width = keys.integer("expert_feed_forward_length", maximum=MAX_WIDTH)
    else:  # what older files have is the width of all experts of a token together
        width = keys.integer("feed_forward_length", minimum=n_used, maximum=MAX_WIDTH) // n_used
    return FeedForwardSizes(
        n_experts=n_experts,
        n_experts_used=n_used,
        ffn_dims=(width,) * keys.n_layers,
        shared_ffn_dim=_read_shared(keys, rule),
    )


def _read_shared(keys: ArchitectureKeys, rule: ExpertRule) -> int:
    if rule.shared == "none":
        return 0
    if rule.shared == "gated" and not keys.has(SHARED_KEY):
        return keys.integer("feed_forward_length", maximum=MAX_WIDTH)
    smallest = 1 if rule.shared == "gated" else 0
    return keys.integer(SHARED_KEY, minimum=smallest, maximum=MAX_WIDTH, default=0)


def _refuse_experts(keys: ArchitectureKeys) -> None:
    n_experts = keys.metadata.get_int(keys.full(COUNT_KEY), default=0)
    if n_experts > 1:  # some converters count the one network of a dense model
        raise FormatError(
            f"{keys.quoted(COUNT_KEY)} is {n_experts}: mixture-of-experts models are not "
            "supported for this architecture; use a dense model"
        )
