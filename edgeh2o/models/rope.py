"""Rotary position embedding as a file describes it: frequencies, and row order of Q and K."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from ..errors import FormatError
from ..formats.metadata import quote
from ..formats.model_tensors import ModelTensors
from ..option_fields import MAX_CONTEXT
from ..rope_config import RopeConfig
from .keys import ArchitectureKeys

ScalingKind = Literal["none", "linear", "yarn", "longrope"]
FACTOR_RANGE = (1e-6, 1e31)  # files say 1e30 of pairs that are not rotated
PATTERN_KEY = "attention.rope_pattern"
ALPHA_KEY = "rope.scaling.alpha"
TEMPERATURE_KEY, TEMPERATURE_PERIOD_KEY = (
    "attention.temperature_scale",
    "attention.temperature_length",
)
BASE_RANGE = {"above": 1.0, "below": 1e15}
DEFAULT_FREQ_BASE = 10000.0
# Turns over the original context between which YaRN passes from full interpolation to none.
YARN_BETA_SLOW, YARN_BETA_FAST = 1.0, 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of a model were stretched beyond the context it was first trained on.

    Attributes:
        kind: "linear" divides all frequencies by ``factor`` (position interpolation), "yarn" only
            the slow ones, "longrope" leaves everything to tables of divisors in the file.
        factor: the divisor, 1 for none.
        original_context: positions of the first training.
        beta_fast, beta_slow: see ``YARN_BETA_FAST``; of "yarn" only.
        log_multiplier: tones down the factor that "yarn" itself has; 1 takes it away.
        scales_logits: "yarn" leaves queries and keys alone, and attention logits have a factor
            with this multiplier instead (DeepSeek-V2).
        attention_factor: factor of the rotated queries and keys.
        is_rounded: "yarn" passes from one to the other between whole pairs.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = YARN_BETA_FAST
    beta_slow: float = YARN_BETA_SLOW
    log_multiplier: float = 0.0
    scales_logits: bool = False
    attention_factor: float = 1.0
    is_rounded: bool = True


NO_SCALING = RopeScaling()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """What an architecture assumes of its rotary embedding beside bases and scalings.

    Attributes:
        none_every: every so many layers the last one has none; 0: all layers have it.
        only_windows: of a model with windows, only layers with one have it.
        has_dense: of a mixture of experts with windows, the first layers, which have none, have it.
        has_pattern: files may say which layers have it.
        has_sections: pairs are parted among the axes of an image (M-RoPE). A text has the same
            position on each, which makes this a plain rotary embedding.
        is_extended: files may part pairs among four axes or not at all, and raise the base by an
            alpha for longer contexts (XD-RoPE).
        has_log_multiplier: files may tone down YaRN's factor of queries and keys.
        has_temperature: files may scale queries by their position.
        unrotated_temperature: in layers without a rotary embedding they are scaled so, by this
            scale and period where files say nothing else.
        scales_logits: see ``RopeScaling``. Files have ten times less as their log multiplier.
        rounds_yarn: see ``RopeScaling``.
    """

    none_every: int = 0
    only_windows: bool = False
    has_dense: bool = False
    has_pattern: bool = False
    has_sections: bool = False
    is_extended: bool = False
    has_log_multiplier: bool = False
    has_temperature: bool = False
    unrotated_temperature: tuple[float, int] | None = None
    scales_logits: bool = False
    rounds_yarn: bool = True

    def layers(self, windows: Sequence[int]) -> tuple[bool, ...]:
        """Whether each layer has a rotary embedding, by the widths of their windows."""
        if self.only_windows and any(windows):
            return tuple(window > 0 for window in windows)
        period = self.none_every
        return tuple(period == 0 or (layer + 1) % period != 0 for layer in range(len(windows)))


PLAIN_ROPE = RopeRule()


def inverse_frequencies(
    rotary_dim: int, base: float, scaling: RopeScaling = NO_SCALING, factors: Sequence[float] = ()
) -> tuple[float, ...]:
    """Radians per position of each of the ``rotary_dim / 2`` pairs, in float64.

    ``base ** (-2 i / rotary_dim)``, divided as ``scaling`` says and by the pair's own entry of
    ``factors`` (the tables of Llama 3 and LongRoPE), if there is one.
    """
    pairs = rotary_dim // 2
    interpolated = (
        [1.0] * pairs if scaling.kind != "yarn" else _yarn_ramp(rotary_dim, base, scaling)
    )
    divisors = factors or (1.0,) * pairs
    return tuple(
        base ** (-2.0 * pair / rotary_dim)
        * (share / scaling.factor + (1.0 - share))
        / divisors[pair]
        for pair, share in enumerate(interpolated)
    )


def yarn_growth(factor: float, multiplier: float = 1.0) -> float:
    """``1 + 0.1 m ln(factor)``: what YaRN multiplies rotated queries and keys with."""
    return 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))


def attention_factor(scaling: RopeScaling) -> float:
    """Factor of the rotated queries and keys.

    YaRN's own is ``1 + 0.1 ln(factor)``, over ``1 + 0.1 m ln(factor)`` with a log multiplier m.
    """
    if scaling.kind != "yarn" or scaling.scales_logits:
        return scaling.attention_factor
    own = yarn_growth(scaling.factor) / yarn_growth(scaling.factor, scaling.log_multiplier)
    return own * scaling.attention_factor


def logit_factor(scaling: RopeScaling) -> float:
    """Factor of attention logits: ``(1 + 0.1 m ln(factor)) ** 2`` with a log multiplier m."""
    if scaling.kind != "yarn" or not scaling.scales_logits:
        return 1.0
    return yarn_growth(scaling.factor, scaling.log_multiplier) ** 2


def check_logit_scaling(scaling: RopeScaling) -> str | None:
    """Why logits cannot be scaled so, if the family scales logits; None: they can.

    What others make of these differs, and no model has them.
    """
    if not scaling.scales_logits or scaling.kind == "none":
        return None
    if scaling.kind != "yarn":
        return None if scaling.factor == 1.0 else f"{scaling.kind} scaling"
    if scaling.log_multiplier == 0.0:
        return "YaRN without rope.scaling.yarn_log_multiplier"
    return None


def _yarn_ramp(rotary_dim: int, base: float, scaling: RopeScaling) -> list[float]:
    """How much of each pair's frequency is interpolated, 0 to 1 (Peng et al. 2023, section 3.2)."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_context / (turns * 2.0 * math.pi)
        return rotary_dim * math.log(wavelength) / (2.0 * math.log(base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.is_rounded:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, rotary_dim - 1)
    width = max(high - low, 1e-3)
    return [min(max((pair - low) / width, 0.0), 1.0) for pair in range(rotary_dim // 2)]


def read_rope_layers(
    keys: ArchitectureKeys, rule: RopeRule, windows: Sequence[int]
) -> tuple[bool, ...]:
    """Whether each layer has a rotary embedding. Raises ``FormatError`` for a bad pattern."""
    if not rule.has_pattern or not keys.has(PATTERN_KEY):
        return rule.layers(windows)
    pattern = keys.metadata.get_array(keys.full(PATTERN_KEY), kinds="b", length=keys.n_layers)
    return tuple(pattern.tolist())


def check_sections(keys: ArchitectureKeys, rule: RopeRule) -> None:
    """Raises ``FormatError`` for pairs parted among axes in a way that a text would notice."""
    name = "rope.dimension_sections"
    if not keys.has(name):
        if rule.has_sections:
            raise FormatError(f"{keys.quoted(name)} is missing; the file is incomplete")
        return
    sections = keys.metadata.get_array(keys.full(name), kinds="iu").tolist()
    if not any(sections):
        return
    if rule.is_extended:
        if len(sections) != 4 or min(sections) < 0:
            raise FormatError(
                f"{keys.quoted(name)} is {sections}, but must be numbers of pairs of four axes"
            )
        return
    if not rule.has_sections:
        raise FormatError(
            f"{keys.quoted(name)} is {sections}, but multimodal rotary embeddings are not "
            "supported for this architecture; use a file of its text model"
        )
    if len(sections) not in (3, 4) or min(sections) < 0 or any(sections[3:]):
        raise FormatError(
            f"{keys.quoted(name)} is {sections}, but must be three numbers, time, height and "
            "width, and perhaps a 0; a fourth axis is not supported"
        )


def read_rope_base(keys: ArchitectureKeys, rule: RopeRule, head_dim: int) -> float:
    """Raises ``FormatError``.

    An alpha is the factor of NTK-aware scaling: the slowest pair turns as many times less.
    """
    base = keys.number("rope.freq_base", **BASE_RANGE, default=DEFAULT_FREQ_BASE)
    if not rule.is_extended or not keys.metadata.get_float(keys.full(ALPHA_KEY), default=0.0):
        return base
    alpha = keys.number(ALPHA_KEY, above=0.0, below=1e6)
    if head_dim <= 2:
        raise FormatError(f"{keys.quoted(ALPHA_KEY)} is {alpha:g}, but heads have one pair")
    return float(base * alpha ** (head_dim / (head_dim - 2)))


def read_rope_scaling(keys: ArchitectureKeys, context_length: int, rule: RopeRule) -> RopeScaling:
    """Scaling as the ``rope.scaling`` keys describe it.

    Older files call the factor ``rope.scale_linear``; 0 means none. Raises ``FormatError``.
    """
    kind = keys.metadata.get_str(keys.full("rope.scaling.type"), default="linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise FormatError(
            f"{keys.quoted('rope.scaling.type')} is {quote(kind)}, which is not supported; "
            "only none, linear, yarn, longrope and the rope_freqs.weight table are"
        )
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = 1.0
    if kind in ("linear", "yarn") and keys.metadata.get_float(keys.full(key), default=0.0):
        factor = keys.number(key, above=1e-3, below=1e6)
    return RopeScaling(
        kind=cast(ScalingKind, kind),
        factor=factor,
        original_context=keys.integer(
            "rope.scaling.original_context_length", maximum=MAX_CONTEXT, default=context_length
        ),
        beta_fast=keys.number(
            "rope.scaling.yarn_beta_fast", above=0.0, below=1e6, default=YARN_BETA_FAST
        ),
        beta_slow=keys.number(
            "rope.scaling.yarn_beta_slow", above=0.0, below=1e6, default=YARN_BETA_SLOW
        ),
        log_multiplier=keys.number(
            "rope.scaling.yarn_log_multiplier", above=-1.0, below=1e2, default=0.0
        )
        * (10.0 if rule.scales_logits else 1.0)
        if rule.has_log_multiplier
        else 0.0,
        scales_logits=rule.scales_logits,
        is_rounded=rule.rounds_yarn,
        attention_factor=keys.number("rope.scaling.attn_factor", above=0.0, below=1e3, default=1.0),
    )


def read_temperature(
    keys: ArchitectureKeys, rule: RopeRule, original_context: int
) -> tuple[float, int]:
    """How much a query grows with the logarithm of its position, 0 for not at all, and the period
    of positions: ``original_context`` where neither the file nor the rule has another."""
    default_scale, default_period = rule.unrotated_temperature or (None, original_context)
    scale = 0.0
    if default_scale is not None:
        scale = keys.number(TEMPERATURE_KEY, above=0.0, below=1e3, default=default_scale)
    elif rule.has_temperature and keys.metadata.get_float(keys.full(TEMPERATURE_KEY), default=0.0):
        scale = keys.number(TEMPERATURE_KEY, above=0.0, below=1e3)
    return scale, keys.integer(TEMPERATURE_PERIOD_KEY, maximum=MAX_CONTEXT, default=default_period)


def changed_scaling(
    scaling: RopeScaling, context_length: int, changes: RopeConfig
) -> tuple[RopeScaling, int]:
    """What ``changes`` make of a file's scaling, and the positions that it then reaches."""
    kind, factor = changes.scaling or scaling.kind, changes.factor
    if factor is None:
        factor = scaling.factor
    if kind == "none":
        factor = 1.0
    changed = replace(
        scaling,
        kind=cast(ScalingKind, kind),
        factor=factor,
        original_context=changes.original_context or scaling.original_context,
        beta_fast=scaling.beta_fast if changes.beta_fast is None else changes.beta_fast,
        beta_slow=scaling.beta_slow if changes.beta_slow is None else changes.beta_slow,
    )
    reached = round(context_length * factor / scaling.factor)
    return changed, max(1, min(reached, MAX_CONTEXT))


def read_factors(
    gguf: ModelTensors, name: str, n_pairs: int, *, n_stored: int | None = None
) -> tuple[float, ...]:
    """A table of frequency divisors, one per pair; empty if the file has no such tensor.

    The first ones of ``n_stored``, where others have more pairs than these.
    Raises ``FormatError`` for another shape and for an entry that cannot be one (NaN, 0, huge).
    """
    info = gguf.tensors.get(name)
    if info is None:
        return ()
    n_stored = n_stored or n_pairs
    if info.shape != (n_stored,) or info.type_name != "F32":
        raise FormatError(
            f"tensor {quote(name)} is {info.type_name} of shape {list(info.shape)}, but RoPE "
            f"factors must be F32 of shape {[n_stored]} (half of rope.dimension_count)"
        )
    factors: tuple[float, ...] = struct.unpack(f"<{n_stored}f", gguf.tensor_bytes(info))
    low, high = FACTOR_RANGE
    for index, factor in enumerate(factors):
        if not low <= factor <= high:
            raise FormatError(
                f"tensor {quote(name)}: entry {index} is {factor:g}, but a RoPE factor must be "
                f"from {low:g} to {high:g}; the file is damaged"
            )
    return factors[:n_pairs]


def half_split_row_order(
    n_rows: int, head_dim: int, rotary_dim: int, is_tail: bool = False
) -> array[int]:
    """Source row of each row when interleaved Q or K rows are put into half-split order.

    In a file of the interleaved kind the pair that turns together is rows (2i, 2i + 1) of each
    head; the core turns rows (i, i + rotary_dim / 2). Rows from ``rotary_dim`` on stay in place,
    or, if the rotated ones are the tail of each head, those before it.
    Returns int32 of shape ``[n_rows]``; ``n_rows`` is a multiple of ``head_dim``. No NumPy: the
    weights are being read before it is imported.
    """
    start = head_dim - rotary_dim if is_tail else 0
    first, second = (range(start + i, start + rotary_dim, 2) for i in range(2))
    head = [*range(start), *first, *second, *range(start + rotary_dim, head_dim)]
    return array("i", [start + row for start in range(0, n_rows, head_dim) for row in head])
