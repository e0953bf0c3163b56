"""Hybrids: models whose layers do not all attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import FormatError
from ..model_config import LayerConfig
from .keys import ArchitectureKeys

CONV_KEY = "shortconv.l_cache"
INTERVAL_KEY = "full_attention_interval"
RECURRENT_KEY = "attention.recurrent_layers"
# As the core has it.
MAX_CONV_TAPS = 16
MAX_DELTA_HEADS, MAX_DELTA_HEAD_DIM = 2**10, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRule:
    """What takes the place of attention in some layers, and in which.

    Attributes:
        mixer: see ``LayerConfig``. Convolutions are in layers without KV heads, delta nets in all
            but every so many layers, of which the last attends.
        is_grouped: the value heads of a delta net that share a key head are neighbours.
    """

    mixer: Literal["short_conv", "delta_net"]
    is_grouped: bool = False


def replace_attention(
    keys: ArchitectureKeys, rule: HybridRule, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers, with the mixer of the rule where it belongs.

    Raises ``FormatError`` that names the key, for a file without any layer that attends too.
    """
    if rule.mixer == "short_conv":
        attends = tuple(layer.n_kv_heads > 0 for layer in layers)
        key = "attention.head_count_kv"
        changes: dict[str, Any] = {
            "n_conv_taps": keys.integer(CONV_KEY, minimum=2, maximum=MAX_CONV_TAPS)
        }
    else:
        attends, key = _read_interval(keys), INTERVAL_KEY
        changes = {"has_grouped_delta_heads": rule.is_grouped, **_read_delta_net(keys)}
    if not any(attends):
        raise FormatError(
            f"{keys.quoted(key)} leaves no layer with attention; models without any are not "
            "supported"
        )
    changes |= {"mixer": rule.mixer, "n_heads": 0, "n_kv_heads": 0, "window": 0}
    return tuple(
        layer if has_attention else replace(layer, **changes)
        for layer, has_attention in zip(layers, attends, strict=True)
    )


def _read_interval(keys: ArchitectureKeys) -> tuple[bool, ...]:
    """Which layers attend."""
    if keys.has(RECURRENT_KEY):
        raise FormatError(
            f"{keys.quoted(RECURRENT_KEY)} is not supported; convert the model anew without it"
        )
    interval = keys.integer(INTERVAL_KEY, maximum=2**10, default=4)
    return tuple((layer + 1) % interval == 0 for layer in range(keys.n_layers))


def _read_delta_net(keys: ArchitectureKeys) -> dict[str, int]:
    key_heads = keys.integer("ssm.group_count", maximum=MAX_DELTA_HEADS)
    value_heads = keys.integer("ssm.time_step_rank", maximum=MAX_DELTA_HEADS)
    head_dim = keys.integer("ssm.state_size", maximum=MAX_DELTA_HEAD_DIM)
    inner = keys.integer("ssm.inner_size", maximum=MAX_DELTA_HEADS * MAX_DELTA_HEAD_DIM)
    if value_heads % key_heads:
        raise FormatError(
            f"{keys.quoted('ssm.time_step_rank')} is {value_heads}, which is not a multiple of "
            f"{keys.quoted('ssm.group_count')} {key_heads}"
        )
    if inner != value_heads * head_dim:
        raise FormatError(
            f"{keys.quoted('ssm.inner_size')} is {inner}, but must be ssm.time_step_rank * "
            f"ssm.state_size = {value_heads * head_dim}: values of another size than keys are not "
            "supported"
        )
    return {
        "n_conv_taps": keys.integer("ssm.conv_kernel", minimum=2, maximum=MAX_CONV_TAPS),
        "n_delta_key_heads": key_heads,
        "n_delta_value_heads": value_heads,
        "delta_head_dim": head_dim,
    }
