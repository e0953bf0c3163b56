"""In which order samplers act, and which of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sampler_names import ADAPTIVE, SAMPLERS

# Options of ``Sampler`` by which a sampler changes nothing.
_OFF: dict[str, dict[str, float]] = {
    "penalties": {"repeat_penalty": 1.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_NO_TARGET = {"adaptive_target": -1.0}
_PENALTIES = ("penalties", "dry")


def arrange(options: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``options`` of ``Sampler`` with what does not act turned off, and the order of what does.

    That is empty where the usual one gives the same. Mirostat has a plain temperature before it,
    and nothing else. A temperature of 0 takes the best token there where it stands: only penalties
    before it act. Adaptive-p is no part of the order: wherever it is named, it acts at the end.
    """
    settings = dict(options)
    samplers = tuple(settings["samplers"])
    if ADAPTIVE not in samplers or settings["mirostat"] or settings["adaptive_target"] < 0:
        settings |= _NO_TARGET
    samplers = tuple(name for name in samplers if name != ADAPTIVE)
    if unknown := set(samplers).difference(SAMPLERS):
        raise ValueError(f"no such samplers: {sorted(unknown)}")
    if settings["mirostat"]:  # as llama.cpp has it
        samplers = ("temperature",)
        settings["dynatemp_range"] = 0.0
    if settings["temperature"] == 0.0 and "temperature" in samplers:
        before = samplers[: samplers.index("temperature")]
        samplers = (*(name for name in before if name in _PENALTIES), "temperature")
        settings |= _NO_TARGET
    if settings["window_size"] == 0:
        settings |= _OFF["penalties"]
    if settings["dry_window_size"] == 0:
        settings |= _OFF["dry"]
    if settings["top_n_sigma"] <= 0:
        settings |= _OFF["top_n_sigma"]
    if settings["top_k"] >= vocab_size:
        settings |= _OFF["top_k"]
    for name, off in _OFF.items():
        if name not in samplers:
            settings |= off
    acting = [
        name for name in samplers if any(settings[key] != off for key, off in _OFF[name].items())
    ]
    is_usual = acting == sorted(set(acting), key=SAMPLERS.index)
    return settings, () if is_usual else tuple(acting)
