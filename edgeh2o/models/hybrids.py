"""Hybrids: models whose layers do not all attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import FormatError
from ..model_config import LayerConfig
from .keys import ArchitectureKeys

CONV_KEY = "shortconv.l_cache"
# As the core has it.
MAX_CONV_TAPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRule:
    """What takes the place of attention in the layers that have no KV heads.

    Attributes:
        mixer: see ``LayerConfig``.
    """

    mixer: Literal["short_conv"]


def replace_attention(
    keys: ArchitectureKeys, rule: HybridRule, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers, with the mixer of the rule in those without KV heads.

    Raises ``FormatError`` that names the key, for a file without any layer that attends too.
    """
    n_taps = keys.integer(CONV_KEY, minimum=2, maximum=MAX_CONV_TAPS)
    if not any(layer.n_kv_heads for layer in layers):
        raise FormatError(
            f"{keys.quoted('attention.head_count_kv')} is 0 in every layer; models without any "
            "attention are not supported"
        )
    return tuple(
        layer
        if layer.n_kv_heads
        else replace(layer, mixer=rule.mixer, n_conv_taps=n_taps, n_heads=0, window=0)
        for layer in layers
    )
