"""Mixtures of experts: how many there are, how wide they are, and how a token's are weighted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import FormatError
from .keys import ArchitectureKeys

COUNT_KEY = "expert_count"
DENSE_KEY = "leading_dense_block_count"
GATE_KEY = "expert_gating_func"
# What files call the gates.
_GATES: Mapping[Literal["softmax", "sigmoid"], int] = {"softmax": 1, "sigmoid": 2}
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
        gate: what makes shares of the router's logits, which a file may have to confirm.
        has_bias: numbers are added to the shares for the choice of experts.
        has_dense_layers: the first layers may have one feed-forward network.
    """

    has_own_width: bool = True
    is_normalised: bool = True
    shared: Literal["none", "optional", "gated"] = "none"
    gate: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    has_dense_layers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSizes:
    """Experts, experts of a token, the width of every layer's networks and of the shared expert.

    The first ``n_dense_layers`` have one network.
    """

    n_experts: int
    n_experts_used: int
    ffn_dims: tuple[int, ...]
    shared_ffn_dim: int = 0
    n_dense_layers: int = 0


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
    widths, n_dense = (width,) * keys.n_layers, 0
    if rule.has_dense_layers:
        n_dense = keys.integer(DENSE_KEY, minimum=0, maximum=keys.n_layers, default=0)
        widths = (
            keys.integers("feed_forward_length", maximum=MAX_WIDTH)[:n_dense] + widths[n_dense:]
        )
    _check_gate(keys, rule)
    return FeedForwardSizes(
        n_experts=n_experts,
        n_experts_used=n_used,
        ffn_dims=widths,
        shared_ffn_dim=_read_shared(keys, rule),
        n_dense_layers=n_dense,
    )


def _check_gate(keys: ArchitectureKeys, rule: ExpertRule) -> None:
    if rule.gate == "softmax":  # what is not said: see refusals.py
        return
    gate = keys.integer(GATE_KEY, minimum=0, maximum=2**31 - 1)
    if gate != _GATES[rule.gate]:
        raise FormatError(
            f"{keys.quoted(GATE_KEY)} is {gate}, but only {_GATES[rule.gate]} ({rule.gate}) is "
            "supported for this architecture"
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
