"""Mixtures of experts: how many there are, how wide they are, and how a token's are weighted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import FormatError
from .keys import ArchitectureKeys

COUNT_KEY = "expert_count"
DENSE_KEY = "leading_dense_block_count"
STEP_KEY = "interleave_moe_layer_step"
GATE_KEY = "expert_gating_func"
LIMIT_KEY, SHARED_LIMIT_KEY = "swiglu_clamp_exp", "swiglu_clamp_shexp"
NORM_KEY, SCALE_KEY = "expert_weights_norm", "expert_weights_scale"
GROUPS_KEY, GROUPS_USED_KEY = "expert_group_count", "expert_group_used_count"
SCALE_KEYS = (SCALE_KEY, GROUPS_KEY)  # those with an effect that others refuse
SHARERS_KEY, ADJUGATE_SCALE_KEY = "experts_per_group", "expert_group_scale"
ADJUGATE_WIDTH_KEY = "expert_chunk_feed_forward_length"
SHARED_COUNT_KEY = "expert_shared_count"
BIAS_TENSORS = (".exp_probs_b.bias", ".exp_probs_b")
ROUTER_TENSOR = "blk.{layer}.ffn_gate_inp.weight"
# What files call the gates.
_GATES: Mapping[Literal["softmax", "sigmoid"], int] = {"softmax": 1, "sigmoid": 2}
SHARED_KEY = "expert_shared_feed_forward_length"
MAX_WIDTH = 2**20
MAX_EXPERTS = 2**10
MAX_LIMIT = 1e6
MAX_GROUPS = 64  # as the core has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """What an architecture assumes of its experts.

    Attributes:
        has_own_width: the width of an expert has a key of its own; else it is that of all.
        is_normalised: the weights of a token's experts are divided by their sum.
        shared: an expert that every token goes through beside its own: never, where the file gives
            its width, always, with a gate or without ("required"), as wide as a "count" of
            experts, as so many ("counted") of its own width, as wide as the networks of "dense"
            models of the architecture are, or "equal" to the others.
        has_norms: router, experts and the shared one have norms of their own.
        gate: what makes shares of the router's logits, which a file may have to confirm, or "file"
            where it says which.
        says_gate: files confirm a sigmoid.
        has_bias: numbers are added to the shares for the choice of experts, always or in files that
            have them.
        has_dense_layers: the first layers may have one feed-forward network.
        has_scales: files say whether shares are normalised, may multiply them, and choose among
            groups of experts first.
        normalises_by_default: with ``has_scales``, files that do not say whether have
            them normalised.
        halves_shared: with a shared expert the sum of all is halved.
        reads_layer_input: routers read what their layer gets, before its mixer, without a norm.
        has_gate_limits: files give limits of the experts' gates, one for all or one for each layer.
        has_output_limits: they may give limits of what comes out of the activation, as well as of
            what it multiplies, and others for the shared expert and networks in the place of
            experts.
        is_optional: files without experts are models of dense layers.
        goes_by_tensors: layers without a router have one feed-forward network, which has the width
            of all where experts have one of their own.
        goes_by_steps: files say that all but the last of so many layers have one.
        scales_inputs: shares are factors of the experts' inputs.
        has_adjugates: files say how many neighbours share another expert, how wide that is, and
            by what factor of their shares it counts (Grove MoE, 2025).
    """

    has_own_width: bool = True
    is_normalised: bool = True
    shared: Literal[
        "none", "optional", "required", "gated", "count", "counted", "dense", "equal"
    ] = "none"
    has_norms: bool = False
    gate: Literal["softmax", "sigmoid", "file"] = "softmax"
    says_gate: bool = True
    has_bias: bool | Literal["optional"] = False
    has_dense_layers: bool = False
    has_scales: bool = False
    normalises_by_default: bool = False
    halves_shared: bool = False
    reads_layer_input: bool = False
    has_gate_limits: bool = False
    has_output_limits: bool = False
    is_optional: bool = False
    goes_by_tensors: bool = False
    goes_by_steps: bool = False
    scales_inputs: bool = False
    has_adjugates: bool = False


# That of ``blocks.BIASED_EXPERTS``, as DeepSeek-V3 (2024) has them.
BIASED_RULE = ExpertRule(
    shared="count",
    gate="sigmoid",
    says_gate=False,
    has_bias=True,
    has_dense_layers=True,
    has_scales=True,
)


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What goes into an activation at most, and the bound of what it multiplies; 0: none."""

    gate: float
    up: float


NO_LIMITS = GateLimits(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSizes:
    """Experts, experts of a token, the width of every layer's networks and of the shared expert.

    The first ``n_dense_layers`` have one network. Where tensors say which layers have one, it has
    the width of ``dense_ffn_dims``. For the adjugates see ``DecoderConfig``.
    """

    n_experts: int
    n_experts_used: int
    ffn_dims: tuple[int, ...]
    shared_ffn_dim: int = 0
    n_dense_layers: int = 0
    is_normalised: bool = True
    gate: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    gate_limits: tuple[GateLimits, ...] = ()
    shared_limits: tuple[GateLimits, ...] = ()
    adjugate_dim: int = 0
    n_adjugate_sharers: int = 1
    adjugate_scale: float = 1.0
    dense_ffn_dims: tuple[int, ...] = ()
    is_dense: tuple[bool, ...] = ()  # of every layer, where no number of first layers says so

    def halved(self) -> FeedForwardSizes:
        """With one of two widths that files give together."""
        return replace(self, ffn_dims=tuple(max(width // 2, 1) for width in self.ffn_dims))


def read_feed_forward(
    keys: ArchitectureKeys, rule: ExpertRule | None, *, may_be_missing: bool = False
) -> FeedForwardSizes:
    """Raises ``FormatError`` that names the key; a rule of None is a family without experts.

    Layers that ``may_be_missing`` have the width 0 where the file says so.
    """
    # Some converters count the one network of a dense model.
    if rule is None or (
        rule.is_optional and keys.metadata.get_int(keys.full(COUNT_KEY), default=0) <= 1
    ):
        if rule is None:
            _refuse_experts(keys)
        fewest = 0 if may_be_missing else 1
        widths = keys.integers("feed_forward_length", maximum=MAX_WIDTH, minimum=fewest)
        return FeedForwardSizes(
            n_experts=0,
            n_experts_used=0,
            ffn_dims=widths,
            n_dense_layers=keys.n_layers if rule else 0,
        )
    n_experts = keys.integer(COUNT_KEY, maximum=MAX_EXPERTS)
    n_used = keys.integer("expert_used_count", maximum=n_experts)
    if not rule.has_own_width:
        width = keys.integer("feed_forward_length", maximum=MAX_WIDTH)
    elif keys.has("expert_feed_forward_length"):
        width = keys.integer("expert_feed_forward_length", maximum=MAX_WIDTH)
    else:  # what older files have is the width of all experts of a token together
        width = keys.integer("feed_forward_length", minimum=n_used, maximum=MAX_WIDTH) // n_used
    widths, n_dense = (width,) * keys.n_layers, 0
    if may_be_missing:
        own = keys.integers("feed_forward_length", maximum=MAX_WIDTH, minimum=0)
        widths = tuple(width * (number > 0) for number in own)
    if rule.has_dense_layers:
        n_dense = keys.integer(DENSE_KEY, minimum=0, maximum=keys.n_layers, default=0)
        widths = (
            keys.integers("feed_forward_length", maximum=MAX_WIDTH)[:n_dense] + widths[n_dense:]
        )
    is_dense: tuple[bool, ...] = ()
    if rule.goes_by_steps:
        step = keys.integer(STEP_KEY, maximum=keys.n_layers)
        is_dense = tuple((layer + 1) % step > 0 for layer in range(keys.n_layers))
        own = keys.integers("feed_forward_length", maximum=MAX_WIDTH)
        widths = tuple(
            dense if is_one else width for dense, is_one in zip(own, is_dense, strict=True)
        )
    n_groups, n_groups_used = _read_groups(keys, rule, n_experts, n_used)
    return FeedForwardSizes(
        n_experts=n_experts,
        n_experts_used=n_used,
        ffn_dims=widths,
        shared_ffn_dim=_read_shared(keys, rule, width),
        n_dense_layers=n_dense,
        is_normalised=keys.metadata.get_bool(
            keys.full(NORM_KEY), default=rule.normalises_by_default
        )
        if rule.has_scales
        else rule.is_normalised,
        gate=_read_gate(keys, rule),
        scale=_read_scale(keys) if rule.has_scales else 1.0,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
        **_read_all_limits(keys, rule),
        is_dense=is_dense,
        dense_ffn_dims=keys.integers("feed_forward_length", maximum=MAX_WIDTH)
        if rule.goes_by_tensors and rule.has_own_width
        else (),
        **(_read_adjugates(keys, n_experts) if rule.has_adjugates else {}),
    )


def _read_adjugates(keys: ArchitectureKeys, n_experts: int) -> dict[str, Any]:
    n_sharers = keys.integer(SHARERS_KEY, maximum=n_experts)
    if n_experts % n_sharers:
        raise FormatError(
            f"{keys.quoted(SHARERS_KEY)} is {n_sharers}, but {n_experts} experts do not make "
            "groups of as many"
        )
    width = keys.integer(ADJUGATE_WIDTH_KEY, maximum=MAX_WIDTH)
    scale = keys.number(ADJUGATE_SCALE_KEY, above=0.0, below=1e6)
    return {"adjugate_dim": width, "n_adjugate_sharers": n_sharers, "adjugate_scale": scale}


def _read_all_limits(keys: ArchitectureKeys, rule: ExpertRule) -> dict[str, Any]:
    if rule.has_gate_limits:
        limits = _read_limits(keys, LIMIT_KEY)
        return {"gate_limits": tuple(GateLimits(limit, limit) for limit in limits)}
    if not rule.has_output_limits:
        return {}
    names = {"gate_limits": LIMIT_KEY, "shared_limits": SHARED_LIMIT_KEY}
    return {
        name: tuple(GateLimits(_silu_input(limit), limit) for limit in _read_limits(keys, key))
        for name, key in names.items()
        if keys.has(key)
    }


def _read_limits(keys: ArchitectureKeys, key: str) -> tuple[float, ...]:
    """Of every layer; 0 for none."""
    limits = keys.numbers(key)
    if not all(0.0 <= limit < MAX_LIMIT for limit in limits):
        raise FormatError(
            f"{keys.quoted(key)} must hold limits from 0 to {MAX_LIMIT:g}; the file is damaged"
        )
    return limits


def _silu_input(output: float) -> float:
    """Where SiLU is a number that is not negative: it grows from 0 on, and is negative below."""
    low, high = 0.0, output + 1.0 if output else 0.0
    for _ in range(80):
        middle = (low + high) / 2.0
        if middle < output * (1.0 + math.exp(-middle)):
            low = middle
        else:
            high = middle
    return high


def _read_gate(keys: ArchitectureKeys, rule: ExpertRule) -> Literal["softmax", "sigmoid"]:
    if rule.gate == "softmax":  # what is not said: see refusals.py
        return "softmax"
    default = _GATES["softmax"] if rule.gate == "file" else None
    if rule.gate == "sigmoid" and not rule.says_gate:
        default = _GATES["sigmoid"]
    gate = keys.integer(GATE_KEY, minimum=0, maximum=2**31 - 1, default=default)
    for name, value in _GATES.items():
        if gate == value and rule.gate in (name, "file"):
            return name
    known = {name: value for name, value in _GATES.items() if rule.gate in (name, "file")}
    raise FormatError(
        f"{keys.quoted(GATE_KEY)} is {gate}, but only "
        f"{' and '.join(f'{value} ({name})' for name, value in known.items())} is supported for "
        "this architecture"
    )


def _read_scale(keys: ArchitectureKeys) -> float:
    if not keys.metadata.get_float(keys.full(SCALE_KEY), default=0.0):
        return 1.0
    return keys.number(SCALE_KEY, above=0.0, below=1e6)


def _read_groups(
    keys: ArchitectureKeys, rule: ExpertRule, n_experts: int, n_used: int
) -> tuple[int, int]:
    """Groups of experts, and how many of them a token's experts are of."""
    n_groups = 1
    if rule.has_scales:
        n_groups = keys.integer(GROUPS_KEY, minimum=0, maximum=MAX_GROUPS, default=1)
    if n_groups <= 1:
        return 1, 1
    if n_experts % n_groups or n_experts < 2 * n_groups:
        raise FormatError(
            f"{keys.quoted(GROUPS_KEY)} is {n_groups}, but {n_experts} experts do not make as many "
            "groups of two or more; the file is damaged"
        )
    n_groups_used = keys.integer(GROUPS_USED_KEY, maximum=n_groups)
    if n_used > n_experts // n_groups * n_groups_used:
        raise FormatError(
            f"{keys.quoted(GROUPS_USED_KEY)} is {n_groups_used}, but as many groups of "
            f"{n_experts // n_groups} experts have fewer than the {n_used} of a token"
        )
    return n_groups, n_groups_used


def _read_shared(keys: ArchitectureKeys, rule: ExpertRule, width: int) -> int:
    if rule.shared == "none":
        return 0
    if rule.shared == "count":
        return width * keys.integer(SHARED_COUNT_KEY, minimum=0, maximum=MAX_EXPERTS, default=0)
    if rule.shared == "equal":
        return width
    if rule.shared == "counted":
        own = keys.integer(SHARED_KEY, minimum=0, maximum=MAX_WIDTH, default=0) or width
        return own * keys.integer(SHARED_COUNT_KEY, minimum=1, maximum=MAX_EXPERTS)
    if rule.shared == "dense" or (rule.shared == "gated" and not keys.has(SHARED_KEY)):
        return keys.integer("feed_forward_length", maximum=MAX_WIDTH)
    if rule.shared == "optional":
        return keys.integer(SHARED_KEY, minimum=0, maximum=MAX_WIDTH, default=0)
    return keys.integer(SHARED_KEY, maximum=MAX_WIDTH)


def _refuse_experts(keys: ArchitectureKeys) -> None:
    n_experts = keys.metadata.get_int(keys.full(COUNT_KEY), default=0)
    if n_experts > 1:  # some converters count the one network of a dense model
        raise FormatError(
            f"{keys.quoted(COUNT_KEY)} is {n_experts}: mixture-of-experts models are not "
            "supported for this architecture; use a dense model"
        )
