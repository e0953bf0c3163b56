"""Configuration and weights of a GGUF file, read by the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.softmax_state import Array

from .families import FAMILIES, Family
from .latent import LatentSizes
from .ngrams import Ngrams
from .rope import frequencies, yarn, yarn_attention_factor
from .weight_names import Weights, name_experts, name_parallel_norms, split_fused, split_latent


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Sizes and constants of the model.

    `inv_freq` has one entry per layer: radians per position of its rotated pairs, already scaled,
    all 0 in a layer without positions. `windows`, `head_dims` and `kv_layers`, the layers whose
    keys and values are read, have one entry per layer. A query at position p is multiplied by `1 +
    temperature_scale * ln(1 + floor(p / temperature_period))`. What attention gives is multiplied
    by `value_scale`; values of heads have `value_dim` numbers if it is not 0. With an `index_top_k`
    it reads as many tokens, which the layer's indexer chooses, or that of a layer before it.
    `order` has the layers as they are gone through, some of them several times; what goes into them
    again is normed as for the output if `norms_loops`. `index_blocks` has the tokens of a block
    that has one score, or 0, of every layer.
    """

    family: Family
    n_layers: int
    model_dim: int
    head_dims: tuple[int, ...]
    kv_layers: tuple[int, ...]
    norm_eps: float
    inv_freq: tuple[Array, ...]
    windows: tuple[int | None, ...]
    attention_scale: float
    max_alibi_bias: float = 0.0
    sliding_scale: float = 0.0
    rope_factor: float = 1.0
    value_scale: float = 1.0
    value_dim: int = 0
    temperature_period: int = 0
    temperature_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    n_experts_used: int = 0
    normalises_experts: bool = True
    has_sigmoid_gate: bool = False
    expert_scale: float = 1.0
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    n_adjugate_sharers: int = 0
    adjugate_scale: float = 0.0
    latent: LatentSizes | None = None
    index_top_k: int = 0
    qkv_limit: float | None = None
    delta_log_floor: float = 0.0
    n_ssd_groups: int = 0
    wkv_head_dim: int = 0
    rescale_every: int = 0
    has_plain_scan_norms: bool = False
    xielu: tuple[tuple[float, ...], ...] = ()
    gate_cutoffs: tuple[float, ...] = ()
    gate_limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    norms_loops: bool = False
    n_streams: int = 0
    index_blocks: tuple[int, ...] = ()
    n_local_blocks: int = -1
    ngrams: Ngrams | None = None
    adapter_tokens: tuple[tuple[int, int], ...] = ()
    adapter_gain: float = 0.0


class _Keys:
    """Metadata by the part of the key after the architecture's name."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.architecture = str(reader.get_field("general.architecture").contents())

    def value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(f"{self.architecture}.{key}")
        if field is not None:
            return field.contents()
        if default is None:
            raise KeyError(key)
        return default

    def xielu(self) -> tuple[tuple[float, ...], ...]:
        """alpha_p, alpha_n, beta and eps of every layer, where there are some."""
        names = ("alpha_p", "alpha_n", "beta", "eps")
        fields = [self._reader.get_field(f"xielu.{name}") for name in names]
        if fields[0] is None:
            return ()
        return tuple(zip(*(field.contents() for field in fields), strict=True))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.value(key, default))


def read_gguf(path: Path) -> tuple[ReferenceConfig, Weights, dict[str, str]]:
    """Configuration, weights, and the types of the tensors that the file has in a block format.

    Fused matrices are split, and experts have a matrix each: ``ffn_up_exps.3.weight``.
    """
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    # Slices of the reader's memory maps take longer than small products.
    weights = {
        tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }
    floats = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}
    quantised = {
        tensor.name: tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.tensor_type not in floats
    }
    for name in [name for name in weights if name.endswith(".ffn_norm")]:
        weights[name + ".weight"] = weights.pop(name)
    if ".attn_kv_a" not in "".join(weights):  # values may be made by the matrix of the keys
        keys = [name for name in weights if name.endswith(".attn_k.weight")]
        twins = {name.replace("attn_k", "attn_v"): name for name in keys}
        weights |= {name: weights[twin] for name, twin in twins.items() if name not in weights}
        quantised |= {name: quantised[twin] for name, twin in twins.items() if twin in quantised}
    config = _read_config(_Keys(reader), weights)
    if config.family.is_parallel and config.family.ffn_norm == "ffn_norm":
        name_parallel_norms(weights)
    name_experts(weights)
    if config.family.mixes_streams:
        norms = ("_hc_norm", "hc_attn_norm", "hc_ffn_norm")
        norms += tuple(f"ple_norm_{name}" for name in ("key", "query", "conv"))
        for name in [name for name in weights if name.removesuffix(".weight").endswith(norms)]:
            weights[name] = weights[name].reshape(config.n_streams, -1)
    key_dim = config.head_dims[0]
    # With those that guess tokens ahead.
    for prefix in sorted({name[: name.index(".", 4) + 1] for name in weights if "blk." in name}):
        split_fused(weights, prefix, key_dim, config.value_dim or key_dim)
        if config.latent is not None and f"{prefix}attn_kv_a_mqa.weight" in weights:
            split_latent(weights, prefix, config.latent)
    if (
        config.family.mamba2_is_single or config.family.is_ungated
    ):  # networks without a gate: it is the other matrix
        for name in [name for name in weights if ".ffn_up" in name]:
            weights[name.replace("ffn_up", "ffn_gate")] = weights[name]
    return config, weights, quantised


def _read_config(keys: _Keys, weights: Weights) -> ReferenceConfig:
    number = keys.number
    family = FAMILIES[keys.architecture]
    has_alibi = family.alibi_depth in (0, number("block_count"))
    if family.alibi_depth and has_alibi:
        family = replace(family, no_rope_period=1)
    is_parallel = bool(keys.value("use_parallel_residual", family.is_parallel))
    family = replace(family, is_parallel=is_parallel)
    n_layers, model_dim = int(number("block_count")), int(number("embedding_length"))
    n_layers -= int(number("nextn_predict_layers", 0.0))
    order = tuple(range(n_layers)) * int(number("num_loops", 1.0))
    if family.has_two_stacks:
        n = int(number("hrm.layers_per_stack"))
        low, high = tuple(range(n)), tuple(range(n, 2 * n))
        order = (low * int(number("hrm.l_cycles")) + high) * int(number("hrm.h_cycles"))
        n_layers = 2 * n
    # Heads are counted by the rows of their matrices: layers may differ.
    n_heads = np.ravel(keys.value("attention.head_count"))[0]
    head_dim = int(number("attention.key_length", model_dim // max(n_heads, 1)))
    rotary_dim = int(number("rope.dimension_count", head_dim))
    window = int(number("attention.sliding_window", family.default_window))
    pattern = keys.value("attention.sliding_window_pattern", family.window_period)
    if not isinstance(pattern, list):
        period = int(pattern)
        full = 0 if family.is_full_first else period - 1
        pattern = [period == 0 or layer % period != full for layer in range(n_layers)]
    windows = tuple(window if window and has_one else None for has_one in pattern)
    is_latent = any(name.endswith(".attn_kv_a_mqa.weight") for name in weights)
    sliding_dim = int(number("attention.key_length_swa", head_dim)) if not is_latent else head_dim
    n_own = n_layers - int(number("attention.shared_kv_layers", 0.0))
    original = number("rope.scaling.original_context_length", number("context_length"))
    rope_factor, logit_factor, latent = 1.0, 1.0, None
    if is_latent:
        head_dim = int(number("attention.key_length_mla", head_dim))
        rank = int(number("attention.kv_lora_rank"))
        latent = LatentSizes(rank, rotary_dim, head_dim - rotary_dim)
    if keys.value("rope.scaling.type", "none") == "yarn":
        log_multiplier = number("rope.scaling.yarn_log_multiplier", 0.0)
        if latent is not None:  # files have a tenth of the multiplier
            logit_factor = (1.0 + log_multiplier * np.log(number("rope.scaling.factor"))) ** 2
        else:
            rope_factor = yarn_attention_factor(number("rope.scaling.factor"), log_multiplier)
    growth = family.unrotated_temperature or (0.0, original)
    embedding, depth, width = family.depth_scales or (1.0, n_layers**0.5, float(model_dim))
    return ReferenceConfig(
        family=family,
        n_layers=n_layers,
        model_dim=model_dim,
        head_dims=tuple(head_dim if window is None else sliding_dim for window in windows),
        kv_layers=tuple(
            layer
            if layer < n_own
            else max(i for i in range(n_own) if (windows[i] is None) == (windows[layer] is None))
            for layer in range(n_layers)
        ),
        norm_eps=number(f"attention.layer_norm_{'' if family.has_layer_norm else 'rms_'}epsilon"),
        xielu=keys.xielu(),
        gate_cutoffs=tuple(keys.value("activation_sparsity_scale", []))
        if family.has_streams
        else (),
        gate_limits=tuple(keys.value("swiglu_clamp_exp", [])),
        shared_limits=tuple(keys.value("swiglu_clamp_shexp", [])),
        inv_freq=_read_frequencies(keys, family, weights, rotary_dim, windows, original),
        windows=windows,
        attention_scale=1.0
        if family.is_gemma4
        else number("attention.scale", head_dim ** (-1 if family.divides_by_head_dim else -0.5))
        * logit_factor,
        max_alibi_bias=number("attention.max_alibi_bias", family.max_alibi_bias * has_alibi),
        sliding_scale=number("attention.key_length_mla_swa", 0.0) ** -0.5
        if keys.value("attention.key_length_mla_swa", 0)
        else 0.0,
        rope_factor=rope_factor,
        value_scale=number("attention.value_scale", 1.0),
        value_dim=int(number("attention.value_length", 0.0))
        if latent is None and sliding_dim == head_dim
        else 0,
        temperature_period=int(number("attention.temperature_length", growth[1])),
        temperature_scale=number("attention.temperature_scale", growth[0]),
        embedding_scale=number(
            "embedding_scale", model_dim**0.5 if family.scales_embedding else embedding
        ),
        residual_scale=number("residual_scale", depth / n_layers**0.5),
        logit_scale=number("logit_scale", model_dim / width) ** (1 if family.scales_logits else -1),
        attention_soft_cap=number("attn_logit_softcapping", 0.0) or None,
        logit_soft_cap=number("final_logit_softcapping", 0.0) or None,
        n_experts_used=int(number("expert_used_count", 0.0)),
        normalises_experts=bool(keys.value("expert_weights_norm", family.normalises_experts)),
        has_sigmoid_gate=family.has_sigmoid_gate or number("expert_gating_func", 0.0) == 2.0,
        expert_scale=number("expert_weights_scale", 1.0),
        n_expert_groups=int(number("expert_group_count", 1.0)),
        n_expert_groups_used=int(number("expert_group_used_count", 1.0)),
        n_adjugate_sharers=int(number("experts_per_group", 0.0)),
        adjugate_scale=number("expert_group_scale", 0.0),
        latent=latent,
        qkv_limit=number("attention.clamp_kqv", 0.0) or None,
        index_top_k=int(number("attention.indexer.top_k", 0.0))
        * int(number("attention.indexer.block_size", 1.0)),
        delta_log_floor=number("kda.gate_lower_bound", 0.0),
        n_ssd_groups=int(number("ssm.group_count", 0.0)),
        wkv_head_dim=int(number("wkv.head_size", 0.0)),
        rescale_every=int(number("rescale_every_n_layers", 0.0)),
        order=order,
        norms_loops=not keys.value("skip_loop_final_norm", False),
        n_streams=int(number("hyper_connection.count", 0.0)),
        index_blocks=_read_blocks(keys, weights, n_layers),
        n_local_blocks=int(number("attention.indexer.local_blocks", -1.0)),
        ngrams=_read_ngrams(keys),
        adapter_tokens=tuple(
            zip(
                keys.value("adapters.token_ids_activate", []),
                keys.value("adapters.token_ids_substitute", []),
                strict=True,
            )
        ),
        adapter_gain=number("adapters.router_gain", 15.0),
        has_plain_scan_norms=bool(keys.value("ssm.dt_b_c_rms", False)),
    )


def _read_blocks(keys: _Keys, weights: Weights, n_layers: int) -> tuple[int, ...]:
    """Tokens of the blocks of every layer's indexer."""
    size = int(keys.number("attention.indexer.block_size", 0.0))
    if not size:
        return tuple(keys.value("attention.compress_ratios", []))
    return tuple(
        size * (f"blk.{layer}.indexer.k_proj.weight" in weights) for layer in range(n_layers)
    )


def _read_ngrams(keys: _Keys) -> Ngrams | None:
    layers = keys.value("ple.layers", [])
    if not layers:
        return None
    return Ngrams(
        layer=int(layers[0]),
        n_tokens=int(keys.number("ple.ngram_size")),
        n_heads_per_size=int(keys.number("ple.heads_per_ngram")),
        end_token=int(keys.number("ple.eos_token_id")),
        factors=tuple(map(int, keys.value("ple.layer_multipliers"))),
        offsets=tuple(map(int, keys.value("ple.head_offsets"))),
        sizes=tuple(map(int, keys.value("ple.head_vocab_sizes"))),
    )


def _read_frequencies(
    keys: _Keys,
    family: Family,
    weights: Weights,
    rotary_dim: int,
    windows: tuple[int | None, ...],
    original_context: float,
) -> tuple[Array, ...]:
    """Of every layer: scaled, unscaled (some layers with a window), or none."""
    base = keys.number("rope.freq_base", 10000.0)
    base *= keys.number("rope.scaling.alpha", 1.0) ** (rotary_dim / (rotary_dim - 2))
    sliding_dim = int(keys.number("rope.dimension_count_swa", rotary_dim))
    if family.halves_full_rotary:
        rotary_dim //= 2
    plain = scaled = frequencies(rotary_dim, base)
    if not keys.value("rope.scaling.finetuned", True):
        return (np.zeros_like(plain),) * len(windows)
    scaling = keys.value("rope.scaling.type", "none")
    if scaling == "linear":
        scaled = plain / keys.number("rope.scaling.factor")
    elif scaling == "yarn":
        scaled = yarn(plain, base, keys.number("rope.scaling.factor"), original_context)
    elif scaling != "none":
        raise ValueError(f"the reference decoder does not know RoPE scaling {scaling!r}")
    if "rope_freqs.weight" in weights:
        scaled = scaled / weights["rope_freqs.weight"][: len(scaled)].astype(np.float64)
    sliding = scaled
    if family.sliding_base is not None:
        sliding = frequencies(sliding_dim, keys.number("rope.freq_base_swa", family.sliding_base))

    pattern = keys.value("attention.rope_pattern", [True] * len(windows))

    def of_layer(layer: int, window: int | None) -> Array:
        if not pattern[layer]:
            return np.zeros_like(plain)
        period = family.no_rope_period
        if period and (layer + 1) % period == 0:
            return np.zeros_like(plain)
        if family.rotates_dense and f"blk.{layer}.ffn_up.weight" in weights:
            return scaled
        if family.rotates_windows_only and any(windows) and window is None:
            return np.zeros_like(plain)
        return scaled if window is None else sliding

    return tuple(of_layer(layer, window) for layer, window in enumerate(windows))
