"""Hybrids: models whose layers do not all attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import FormatError
from ..layer_config import MAX_CONV_TAPS, LayerConfig
from .experts import MAX_WIDTH
from .keys import ArchitectureKeys

CONV_KEY = "shortconv.l_cache"
NORMS_KEY = "ssm.dt_b_c_rms"
INTERVAL_KEY = "full_attention_interval"
RECURRENT_KEY = "attention.recurrent_layers"
SHIFTS_KEY = "token_shift_count"
GATE_RANK_KEY = "attention.gate_lora_rank"
HEAD_NORM_TENSOR = "blk.{layer}.time_mix_ln.weight"
RESCALE_KEY = "rescale_every_n_layers"
# As the core has them.
MAX_DELTA_HEADS, MAX_DELTA_HEAD_DIM = 2**10, 512
MAX_SSD_HEADS, MAX_SSD_HEAD_DIM, MAX_SSD_STATE_DIM = 2**10, 2**10, 2**12
MAX_WKV_HEAD_DIM, MAX_WKV_RANK = 512, 2**16
MAX_SCAN_CHANNELS, MAX_SCAN_STATE_DIM, MAX_SCAN_STEP_RANK = 2**20, 2**10, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRule:
    """What takes the place of attention in some layers, and in which.

    Attributes:
        mixer: see ``LayerConfig``. Convolutions, Mamba and "none" are in layers without KV heads,
            delta nets in all but every so many layers, of which the last attends;
            "attention_mamba2" is in all layers.
        is_grouped: the value heads of a delta net that share a key head are neighbours.
        has_sigmoid: what comes out of a delta net is multiplied by sigmoids, not by SiLU.
        row_decays: rows of the states of a delta net decay by themselves (Kimi Delta Attention),
            and it is in layers without KV heads: to a bound that files give, or without any, by
            vectors as long as a head ("unbounded").
        has_one_branch: a layer has a mixer or a feed-forward network, not both: the latter where
            the file gives its width, and attention where it gives KV heads.
        has_attention: some layers attend; else none does, and no file says how many heads it has.
        has_norms: Mamba-1 norms what it selects by, with weights; else files may say that it does,
            without.
        has_shifted_network: of RWKV, whose networks then have parts of the token before in their
            inputs too, as mixers have; else they are plain, and mixers may lack gates, and norms of
            heads.
        groups_keys: of RWKV, whose files then say of how many heads keys and values are.
        selects: Mamba-2 makes its rates, and what writes to the state and reads it, of its
            channels, as Mamba-1 does, with norms (PLaMo 2). Layers that have it have no heads.
    """

    mixer: Literal[
        "short_conv", "delta_net", "mamba1", "mamba2", "attention_mamba2", "rwkv6", "rwkv7", "none"
    ]
    is_grouped: bool = False
    has_sigmoid: bool = False
    row_decays: Literal["none", "bounded", "unbounded"] = "none"
    has_one_branch: bool = False
    has_attention: bool = True
    has_norms: bool = True
    has_shifted_network: bool = True
    groups_keys: bool = False
    selects: bool = False

    @property
    def goes_by_kv_heads(self) -> bool:
        """Whether layers without KV heads are those without attention."""
        return self.row_decays != "none" or self.mixer not in ("delta_net", "attention_mamba2")


def replace_attention(
    keys: ArchitectureKeys, rule: HybridRule, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers, with the mixer of the rule where it belongs.

    Raises ``FormatError`` that names the key, for a file without any layer that attends too.
    """
    changes = _read_sizes(keys, rule)
    if rule.mixer == "attention_mamba2":
        return tuple(replace(layer, mixer=rule.mixer, **changes) for layer in layers)
    if rule.goes_by_kv_heads:
        attends = tuple(rule.has_attention and layer.n_kv_heads > 0 for layer in layers)
        key = "attention.head_count_kv"
    else:
        attends, key = _read_interval(keys), INTERVAL_KEY
    if rule.has_attention and not any(attends):
        raise FormatError(
            f"{keys.quoted(key)} leaves no layer with attention; models without any are not "
            "supported"
        )
    period = 0
    if rule.mixer == "rwkv6" and rule.has_shifted_network:
        period = keys.integer(RESCALE_KEY, minimum=0, maximum=2**10, default=0)
    no_heads: dict[str, Any] = {"n_heads": 0, "n_kv_heads": 0, "window": 0}
    replaced = []
    for index, (layer, has_attention) in enumerate(zip(layers, attends, strict=True)):
        if rule.mixer == "none" and layer.n_heads and not has_attention:
            raise FormatError(
                f"{keys.quoted(key)} is 0 in layer {index}, which has heads: attention that is one "
                "matrix without heads is not supported"
            )
        has_ffn_only = rule.has_one_branch and layer.ffn_dim > 0
        if has_ffn_only and has_attention:
            raise FormatError(
                f"layer {index} has both KV heads ({keys.quoted(key)}) and a "
                f"{keys.quoted('feed_forward_length')}, but layers of this architecture have one"
            )
        if has_ffn_only:
            layer = replace(layer, mixer="none", **no_heads)
        elif not has_attention:
            own = _read_key_heads(keys, layer, changes) if rule.groups_keys else changes
            layer = replace(layer, mixer=rule.mixer, **no_heads, **own)
        if rule.mixer == "rwkv7" and index == 0:  # others have its values
            layer = replace(layer, wkv_value_rank=0)
        if period and (index + 1) % period == 0:  # as the matrices behind it are written
            layer = replace(layer, output_scale=0.5)
        replaced.append(layer)
    return tuple(replaced)


def _read_sizes(keys: ArchitectureKeys, rule: HybridRule) -> dict[str, Any]:
    """Fields of ``LayerConfig`` of the layers with the mixer."""
    if rule.mixer == "none":
        return {}
    if rule.mixer == "rwkv7":
        return _read_rwkv7(keys, rule)
    if rule.mixer == "rwkv6":
        return _read_rwkv6(keys, rule)
    if rule.mixer == "short_conv":
        return {"n_conv_taps": keys.integer(CONV_KEY, minimum=2, maximum=MAX_CONV_TAPS)}
    taps = {"n_conv_taps": keys.integer("ssm.conv_kernel", minimum=2, maximum=MAX_CONV_TAPS)}
    if rule.row_decays != "none":
        return {**taps, **_read_row_decays(keys, is_bounded=rule.row_decays == "bounded")}
    if rule.mixer == "delta_net":
        kind = {"has_grouped_delta_heads": rule.is_grouped, "has_delta_sigmoid": rule.has_sigmoid}
        return {**taps, **kind, **_read_delta_net(keys)}
    if rule.mixer == "mamba1":
        return {**taps, **_read_mamba1(keys, rule)}
    return {**taps, **(_read_selecting(keys) if rule.selects else _read_mamba2(keys))}


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
    _check_multiple(keys, value_heads, key_heads)
    if inner != value_heads * head_dim:
        raise FormatError(
            f"{keys.quoted('ssm.inner_size')} is {inner}, but must be ssm.time_step_rank * "
            f"ssm.state_size = {value_heads * head_dim}: values of another size than keys are not "
            "supported"
        )
    return {
        "n_delta_key_heads": key_heads,
        "n_delta_value_heads": value_heads,
        "delta_head_dim": head_dim,
    }


def _read_row_decays(keys: ArchitectureKeys, *, is_bounded: bool) -> dict[str, Any]:
    """Heads are as many as those of attention."""
    n_heads = keys.integer("attention.head_count", maximum=MAX_DELTA_HEADS)
    head_dim = keys.integer("kda.head_dim", maximum=MAX_DELTA_HEAD_DIM)
    sizes = {
        "has_row_decays": True,
        "n_delta_key_heads": n_heads,
        "n_delta_value_heads": n_heads,
        "delta_head_dim": head_dim,
    }
    if not is_bounded:
        return {**sizes, "delta_gate_rank": head_dim}
    if not keys.metadata.get_bool(keys.full("kda.safe_gate"), default=True):
        raise FormatError(
            f"{keys.quoted('kda.safe_gate')} is false: decays without a lower bound are not "
            "supported"
        )
    floor = keys.number("kda.gate_lower_bound", above=-1e3, below=0.0)
    return {**sizes, "delta_log_floor": floor}


def _read_selecting(keys: ArchitectureKeys) -> dict[str, int]:
    """No key says how many numbers rates are made of."""
    if n_groups := keys.integer("ssm.group_count", minimum=0, maximum=MAX_SSD_HEADS):
        raise FormatError(
            f"{keys.quoted('ssm.group_count')} is {n_groups}, but only 0 is supported: what writes "
            "to the state is one for all heads"
        )
    model_dim = keys.integer("embedding_length", maximum=MAX_WIDTH)
    return {**_read_mamba2(keys, n_groups=1), "ssd_step_rank": max(64, model_dim // 16)}


def _read_mamba2(keys: ArchitectureKeys, n_groups: int | None = None) -> dict[str, int]:
    """Files call the number of heads the rank of the time steps, which it was in Mamba 1."""
    if n_groups is None:
        n_groups = keys.integer("ssm.group_count", maximum=MAX_SSD_HEADS)
    n_heads = keys.integer("ssm.time_step_rank", maximum=MAX_SSD_HEADS)
    inner = keys.integer("ssm.inner_size", maximum=MAX_SSD_HEADS * MAX_SSD_HEAD_DIM)
    _check_multiple(keys, n_heads, n_groups)
    if inner % n_heads or inner // n_heads > MAX_SSD_HEAD_DIM:
        raise FormatError(
            f"{keys.quoted('ssm.inner_size')} is {inner}, but must be {n_heads} "
            f"({keys.quoted('ssm.time_step_rank')}) heads of at most {MAX_SSD_HEAD_DIM} numbers"
        )
    return {
        "n_ssd_heads": n_heads,
        "ssd_head_dim": inner // n_heads,
        "n_ssd_groups": n_groups,
        "ssd_state_dim": keys.integer("ssm.state_size", maximum=MAX_SSD_STATE_DIM),
    }


def _read_mamba1(keys: ArchitectureKeys, rule: HybridRule) -> dict[str, Any]:
    norms = "weighted" if rule.has_norms else "none"
    if not rule.has_norms and keys.metadata.get_bool(keys.full(NORMS_KEY), default=False):
        norms = "plain"
    return {
        "scan_norms": norms,
        "n_scan_channels": keys.integer("ssm.inner_size", maximum=MAX_SCAN_CHANNELS),
        "scan_state_dim": keys.integer("ssm.state_size", maximum=MAX_SCAN_STATE_DIM),
        "scan_step_rank": keys.integer("ssm.time_step_rank", maximum=MAX_SCAN_STEP_RANK),
    }


def _read_rwkv_heads(keys: ArchitectureKeys, rule: HybridRule) -> dict[str, Any]:
    """They are together as wide as the model."""
    head_dim = keys.integer("wkv.head_size", maximum=MAX_WKV_HEAD_DIM)
    model_dim = keys.integer("embedding_length", maximum=MAX_WIDTH)
    if model_dim % head_dim:
        raise FormatError(
            f"{keys.quoted('embedding_length')} is {model_dim}, which is not a multiple of "
            f"{keys.quoted('wkv.head_size')} {head_dim}"
        )
    what = "one of the mixer and one of the network" if rule.has_shifted_network else "of the mixer"
    n_shifts = 2 if rule.has_shifted_network else 1
    shifts = keys.integer(SHIFTS_KEY, maximum=2**10, default=n_shifts)
    if shifts != n_shifts:
        raise FormatError(
            f"{keys.quoted(SHIFTS_KEY)} is {shifts}, but only {n_shifts} is supported: {what}"
        )
    n_heads = model_dim // head_dim
    return {
        "n_wkv_heads": n_heads,
        "n_wkv_kv_heads": n_heads,
        "wkv_head_dim": head_dim,
        "has_shifted_network": rule.has_shifted_network,
        "n_conv_taps": 2,
    }


def _read_key_heads(
    keys: ArchitectureKeys, layer: LayerConfig, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """With the heads of keys and values; 0 where every head has its own."""
    n_heads, n_kv_heads = fields["n_wkv_heads"], layer.n_kv_heads or fields["n_wkv_heads"]
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{keys.quoted('attention.head_count_kv')} is {n_kv_heads}, by which the {n_heads} "
            f"heads of {keys.quoted('wkv.head_size')} numbers do not divide"
        )
    return {**fields, "n_wkv_kv_heads": n_kv_heads}


def _read_rwkv6(keys: ArchitectureKeys, rule: HybridRule) -> dict[str, Any]:
    return {
        **_read_rwkv_heads(keys, rule),
        "wkv_norms_heads": rule.has_shifted_network,
        "wkv_decay_rank": keys.integer("time_decay_extra_dim", maximum=MAX_WKV_RANK),
        "wkv_shift_rank": keys.integer("time_mix_extra_dim", maximum=MAX_WKV_RANK),
    }


def _read_rwkv7(keys: ArchitectureKeys, rule: HybridRule) -> dict[str, Any]:
    heads = _read_rwkv_heads(keys, rule)
    ranks = {
        f"wkv_{name}_rank": keys.integer(f"attention.{key}_lora_rank", maximum=MAX_WKV_RANK)
        for name, key in (("decay", "decay"), ("rate", "iclr"), ("value", "value_residual_mix"))
    }
    fewest, default = (1, None) if rule.has_shifted_network else (0, 0)
    gate_rank = keys.integer(GATE_RANK_KEY, minimum=fewest, maximum=MAX_WKV_RANK, default=default)
    return {**heads, **ranks, "wkv_gate_rank": gate_rank}


def _check_multiple(keys: ArchitectureKeys, n_heads: int, n_groups: int) -> None:
    if n_heads % n_groups:
        raise FormatError(
            f"{keys.quoted('ssm.time_step_rank')} is {n_heads}, which is not a multiple of "
            f"{keys.quoted('ssm.group_count')} {n_groups}"
        )


def ssd_sizes(layer: LayerConfig) -> Mapping[str, int]:
    """Named sizes of the tensors of Mamba-2: see ``Hyperparameters.sizes``."""
    inner = layer.n_ssd_heads * layer.ssd_head_dim
    bc_dim = 2 * layer.n_ssd_groups * layer.ssd_state_dim
    conv = inner if layer.ssd_step_rank else inner + bc_dim
    n_rates = 0 if layer.ssd_step_rank else layer.n_ssd_heads
    return {
        "n_ssd_heads": layer.n_ssd_heads,
        "n_ssd_groups": layer.n_ssd_groups,
        "ssd_inner_dim": inner,
        "ssd_group_dim": inner // max(layer.n_ssd_groups, 1),
        "ssd_conv_dim": conv,
        "ssd_bc_dim": layer.n_ssd_groups * layer.ssd_state_dim,
        "ssd_in_dim": inner + conv + n_rates,
        "ssd_state_dim": layer.ssd_state_dim,
        "ssd_step_rank": layer.ssd_step_rank,
        "ssd_projected_dim": bc_dim + layer.ssd_step_rank,
    }


def wkv_sizes(layer: LayerConfig) -> Mapping[str, int]:
    """Named sizes of the tensors of RWKV: see ``Hyperparameters.sizes``."""
    return {
        "n_wkv_shares": 6 if layer.wkv_gate_rank else 5,
        "n_wkv_heads": layer.n_wkv_heads,
        "wkv_head_dim": layer.wkv_head_dim,
        "wkv_kv_dim": layer.n_wkv_kv_heads * layer.wkv_head_dim,
        "wkv_shift_rank": layer.wkv_shift_rank,
        "wkv_shifts_dim": 5 * layer.wkv_shift_rank,
        "wkv_decay_rank": layer.wkv_decay_rank,
        "wkv_rate_rank": layer.wkv_rate_rank,
        "wkv_value_rank": layer.wkv_value_rank,
        "wkv_gate_rank": layer.wkv_gate_rank,
    }


def scan_sizes(layer: LayerConfig) -> Mapping[str, int]:
    """Named sizes of the tensors of Mamba-1: see ``Hyperparameters.sizes``."""
    return {
        "n_scan_channels": layer.n_scan_channels,
        "scan_in_dim": 2 * layer.n_scan_channels,
        "scan_state_dim": layer.scan_state_dim,
        "scan_step_rank": layer.scan_step_rank,
        "scan_projected_dim": layer.scan_step_rank + 2 * layer.scan_state_dim,
    }
