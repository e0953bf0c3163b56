"""The rotary embedding of config.json as GGUF keys and tables."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormatError
from ..rope import (
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    RopeScaling,
    inverse_frequencies,
    yarn_growth,
)
from ..spec import find_architecture
from .family import TransformersFamily
from .settings import Settings

# Of Llama 3.1 and later, and of LongRoPE: frequency divisors.
FACTORS_NAME = "rope_freqs.weight"
SHORT_NAME, LONG_NAME = "rope_factors_short.weight", "rope_factors_long.weight"


@dataclass(slots=True)
class RopeWords:
    """Keys after the architecture's name, and tables of float32 by the name of their tensor."""

    keys: dict[str, int | float | str] = field(default_factory=dict)
    tables: dict[str, bytes] = field(default_factory=dict)


def read_rope(
    settings: Settings, family: TransformersFamily, rotary_dim: int, context_length: int
) -> RopeWords:
    """Reads ``rope_theta`` and ``rope_scaling``, or the ``rope_parameters`` of transformers 5.

    ``settings`` is config.json, ``rotary_dim`` the rotated size of a head. Raises FormatError for
    a scaling that is not understood.
    """
    words = RopeWords()
    original = settings.integer("original_max_position_embeddings", default=context_length)
    scaling, base, sliding_base = _find_parameters(settings)
    if base is not None:
        words.keys["rope.freq_base"] = base
    if sliding_base is not None:
        words.keys["rope.freq_base_swa"] = sliding_base
    if scaling is None:
        return words
    scaling.take("partial_rotary_factor")  # of which rotary_dim is made
    for key in family.rope_keys:
        scaling.take(key)
    kind = scaling.take("rope_type", scaling.take("type", "default"))
    reader = _KINDS.get(str(kind))
    if kind == "dynamic" and family.has_rope_alpha:
        reader = _read_alpha
    if kind == "mrope" and "mrope_section" in family.rope_keys:
        reader = _read_default
    if reader is None:
        raise FormatError(
            f"{scaling.label('rope_type')} is {kind!r:.40}, which is not supported; supported: "
            f"{', '.join(_KINDS)}"
        )
    original = scaling.integer("original_max_position_embeddings", default=original)
    is_rounded = bool(scaling.take("truncate", True)) if kind == "yarn" else True
    # Of others it takes a table, which not every architecture has.
    may_be_exact = family.has_exact_yarn or find_architecture(family.architecture).rope_factors
    if kind == "yarn" and (family.has_exact_yarn if is_rounded else not may_be_exact):
        found = "true" if is_rounded else "false"
        raise FormatError(
            f"{scaling.label('truncate')} is {found}, which is not supported for this model"
        )
    reader(words, scaling, rotary_dim, context_length, original)
    if kind == "yarn" and "mscale" not in family.rope_keys:  # which have formulas of their own
        _multiply_yarn(words, scaling)
    if not is_rounded and not family.has_exact_yarn:
        _tabulate_yarn(words, rotary_dim)
    scaling.refuse_rest()
    return words


def _find_parameters(settings: Settings) -> tuple[Settings | None, float | None, float | None]:
    """The scaling, the base, and the base of layers with a window, where they are given."""
    base = settings.number("rope_theta", default=None)
    local = settings.number("rope_local_base_freq", default=None)
    scaling = settings.section("rope_scaling")
    parameters = settings.section("rope_parameters")
    if parameters is None:
        return scaling, base, local
    sliding = parameters.section("sliding_attention")
    full = parameters.section("full_attention")
    if sliding is not None:
        local = sliding.number("rope_theta", default=local)
        if sliding.take("rope_type", "default") != "default":
            raise FormatError(f"{sliding.label('rope_type')} is not supported there")
        sliding.refuse_rest()
    if full is not None:
        parameters.refuse_rest()
        parameters = full
    return parameters, parameters.number("rope_theta", default=base), local


def _read_default(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    pass


def _read_alpha(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    """The base is stretched once for all lengths; other keys of the scaling have no effect."""
    alpha = scaling.number("alpha")
    if not (alpha > 0 and rotary_dim > 2):
        raise FormatError(f"{scaling.label('alpha')} is {alpha:g}, but must be above 0")
    for key in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        scaling.take(key)
    base = float(words.keys.get("rope.freq_base", 10000.0))
    words.keys["rope.freq_base"] = base * alpha ** (rotary_dim / (rotary_dim - 2))


def _read_linear(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    words.keys |= {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": scaling.number("factor"),
    }


def _read_yarn(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    factor = scaling.number("factor", default=context / original)
    words.keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    for key in ("beta_fast", "beta_slow"):
        value = scaling.number(key, default=None)
        if value:  # 0 stands for the default
            words.keys[f"rope.scaling.yarn_{key}"] = value
    given = scaling.number("attention_factor", default=None)
    if given is not None:  # in place of YaRN's own, which GGUF multiplies with
        words.keys["rope.scaling.attn_factor"] = given / yarn_growth(factor)


def _multiply_yarn(words: RopeWords, scaling: Settings) -> None:
    """The multipliers of DeepSeek, as transformers has them for all models: both or none count."""
    one, all_dims = (scaling.number(key, default=0.0) for key in ("mscale", "mscale_all_dim"))
    if one and all_dims and scaling.take("attention_factor") is None:
        factor = float(words.keys["rope.scaling.factor"])
        growth = yarn_growth(factor, one) / yarn_growth(factor, all_dims)
        words.keys["rope.scaling.attn_factor"] = growth / yarn_growth(factor)


def _tabulate_yarn(words: RopeWords, rotary_dim: int) -> None:
    """YaRN whose ramp is not rounded to whole pairs, which GGUF has no word for, as divisors."""
    keys = words.keys
    base, factor = float(keys.get("rope.freq_base", 10000.0)), float(keys["rope.scaling.factor"])
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=int(keys["rope.scaling.original_context_length"]),
        beta_fast=float(keys.get("rope.scaling.yarn_beta_fast", YARN_BETA_FAST)),
        beta_slow=float(keys.get("rope.scaling.yarn_beta_slow", YARN_BETA_SLOW)),
        is_rounded=False,
    )
    plain = inverse_frequencies(rotary_dim, base)
    stretched = inverse_frequencies(rotary_dim, base, scaling)
    words.tables[FACTORS_NAME] = _pack([a / b for a, b in zip(plain, stretched, strict=True)])
    growth = float(keys.get("rope.scaling.attn_factor", 1.0)) * yarn_growth(factor)
    words.keys = {name: value for name, value in keys.items() if "scaling" not in name}
    words.keys["rope.scaling.attn_factor"] = growth


def _read_llama3(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    """Slow pairs are interpolated, fast ones are not, those between in part."""
    factor, low, high = (
        scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if not (factor > 0 and high > low):
        raise FormatError(f"{scaling.label('high_freq_factor')} must be above low_freq_factor")
    base = float(words.keys.get("rope.freq_base", 10000.0))
    if base <= 1.0:
        raise FormatError(f"{scaling.label('rope_theta')} must be above 1")
    divisors = []
    for pair in range(rotary_dim // 2):
        turns = original * base ** (-2.0 * pair / rotary_dim) / (2.0 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)  # that stays as it is
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    words.tables[FACTORS_NAME] = _pack(divisors)


def _read_proportional(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    """The fastest pairs of a head are rotated, the others are not."""
    share = scaling.number("partial_rotary_factor", default=1.0)
    n_rotated = int(rotary_dim * share / 2)
    words.tables[FACTORS_NAME] = _pack([1.0] * n_rotated + [1e30] * (rotary_dim // 2 - n_rotated))


def _read_longrope(
    words: RopeWords, scaling: Settings, rotary_dim: int, context: int, original: int
) -> None:
    for key, name in (("short_factor", SHORT_NAME), ("long_factor", LONG_NAME)):
        words.tables[name] = _pack(scaling.numbers(key, rotary_dim // 2))
    stretch = scaling.number("factor", default=context / original)
    default = (
        math.sqrt(1.0 + math.log(stretch) / math.log(original))
        if min(stretch, original) > 1
        else 1.0
    )
    words.keys |= {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": scaling.number("attention_factor", default=default),
    }


_KINDS: Mapping[str, Any] = {
    "default": _read_default,
    "linear": _read_linear,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
    "proportional": _read_proportional,
    "su": _read_longrope,  # what Phi 3 first called it
}


def _pack(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
