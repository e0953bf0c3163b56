"""The rotary embedding of config.json as GGUF keys and tables."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormatError
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
    if kind == "yarn" and scaling.take("truncate", True) is family.has_exact_yarn:
        found = "true" if family.has_exact_yarn else "not true"
        raise FormatError(
            f"{scaling.label('truncate')} is {found}, which is not supported for this model"
        )
    reader(words, scaling, rotary_dim, context_length, original)
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
    factor = scaling.number("factor")
    words.keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    for key in ("beta_fast", "beta_slow"):
        value = scaling.number(key, default=None)
        if value is not None:
            words.keys[f"rope.scaling.yarn_{key}"] = value
    given = scaling.number("attention_factor", default=None)
    if given is not None:  # in place of YaRN's own, which GGUF multiplies with
        words.keys["rope.scaling.attn_factor"] = given / (1.0 + 0.1 * math.log(max(factor, 1.0)))


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
