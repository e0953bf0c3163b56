"""The one reader of model files: checks a file against the table of its architecture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from .. import _core
from ..errors import FormatError, UsageError
from ..formats.fingerprint import fingerprint_weights
from ..formats.lora_file import ADAPTER, TYPE_KEY
from ..formats.metadata import Metadata, quote
from ..formats.model_tensors import ModelTensors
from ..model_config import DecoderConfig
from ..rope_config import ROPE_OF_FILE, RopeConfig
from . import blocks
from .dense_modules import DENSE_TENSORS, read_dense_modules
from .experts import (
    BIAS_TENSORS,
    DENSE_KEY,
    GATE_KEY,
    LIMIT_KEY,
    SCALE_KEYS,
    SHARED_KEY,
    SHARED_LIMIT_KEY,
    STEP_KEY,
)
from .hybrids import NORMS_KEY
from .hyperparameters import DRAFTING_KEY, TOKEN_INPUT_KEY, Hyperparameters
from .joined import bind_joined
from .key_biases import mark_key_biases
from .layer_keys import SHARED_KV_KEY
from .mixed_streams import TABLE_TENSOR, find_table
from .own_adapters import own_updates, read_adapters
from .passes import LOOPS_KEY
from .ranking import read_ranking
from .refusals import refuse_unread
from .rope import (
    ALPHA_KEY,
    TEMPERATURE_KEY,
    attention_factor,
    check_logit_scaling,
    inverse_frequencies,
    logit_factor,
    read_factors,
)
from .rope import PATTERN_KEY as ROPE_PATTERN_KEY
from .spec import ArchitectureSpec, find_architecture
from .tensor_marks import as_first_layer, mark_layers
from .tensors import TensorBinding

_IMATRIX = "imatrix"
OUTPUT_TENSOR, OUTPUT_BIAS = "output.weight", "output.bias"
TYPES_TENSOR = "token_types.weight"
SECOND_NORM = "blk.0.attn_norm_2.weight"
ACTIVATION_KEY = "hidden_activation"
POSITIONS_TENSOR = "position_embd.weight"
# Published models have 8; slopes are 2 to the power of minus that at the least.
ALIBI_KEY = "attention.max_alibi_bias"
MAX_ALIBI_BIAS = 128.0
QK_NORM_TENSOR = "blk.0.attn_q_norm.weight"
# As llama.cpp numbers them.
_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
FUSED_TENSOR, FUSED_BIAS = "blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"


def read_model(
    gguf: ModelTensors, rope: RopeConfig = ROPE_OF_FILE
) -> tuple[DecoderConfig, list[TensorBinding]]:
    """Checks a file against its architecture; returns its configuration and its weights.

    ``rope`` changes the rotary embedding. Bindings are in file order. Raises ``FormatError`` that
    names the key or the tensor, and ``UsageError`` for a ``rope`` that the model cannot have.
    """
    try:
        if gguf.metadata.get(TYPE_KEY) == ADAPTER:
            raise FormatError("it is a LoRA adapter; name its model, and this with --lora")
        if gguf.metadata.get(TYPE_KEY) == _IMATRIX:
            raise FormatError("it is an importance matrix (imatrix) and no model; give the model")
        spec = find_architecture(gguf.metadata.get_str("general.architecture"))
        shape = spec.read_shape(gguf.metadata)
        shape = mark_layers(gguf, spec, shape)
        if spec.has_any_network:
            spec = as_first_layer(gguf, spec, shape)
        refuse_unread(gguf.metadata, spec.name, _optional_keys(spec))
        factors = [name for name in (spec.rope_factors, *(spec.long_rope_factors or ())) if name]
        n_layers = len(shape.layers)
        drafting = tuple(f"blk.{n_layers + i}." for i in range(shape.n_drafting_layers))
        left_out = [name for name in gguf.tensors if drafting and name.startswith(drafting)]
        ranking = list(spec.ranking.tensors) if spec.ranking else []
        modules = list(DENSE_TENSORS) if spec.has_dense_modules else []
        if shape.ngrams is not None:
            table = find_table(gguf.tensors, shape.ngrams, _core.supported_types())
            shape = replace(shape, ngrams=replace(shape.ngrams, n_rows=table.rows))
            ranking.append(TABLE_TENSOR)
        bindings = bind_joined(
            gguf.tensors,
            spec.rules(shape, is_fused=FUSED_TENSOR in gguf.tensors),
            shape,
            architecture=spec.name,
            interleaved=spec.qk_row_order == "interleaved",
            read_elsewhere=[
                *factors,
                *left_out,
                *spec.unused_tensors,
                *ranking,
                *modules,
                *_unread(spec, shape),
                *(own_updates(gguf.tensors) if spec.chooses_adapters else ()),
            ],
        )
        if cause := check_logit_scaling(shape.rope_scaling):
            raise FormatError(f"{cause} is not supported for the architecture {spec.name!r}")
        if rope != ROPE_OF_FILE:
            shape = _change_rope(gguf, spec, shape, rope)
        config = replace(
            make_config(gguf, spec, shape),
            **_depth_scales(spec, shape),
            **_read_scales(gguf.metadata, spec),
            fingerprint=fingerprint_weights(gguf),
            **(read_adapters(gguf, spec.name, shape.vocab_size) if spec.chooses_adapters else {}),
        )
        return mark_key_biases(config, gguf, bindings), bindings
    except FormatError as error:
        raise FormatError(f"{gguf.path}: {error}") from None


def _unread(spec: ArchitectureSpec, shape: Hyperparameters) -> list[str]:
    """Indexers of layers that a file has read everything."""
    if not spec.scores_blocks:
        return []
    return [
        f"blk.{i}.indexer.{name}.weight"
        for i, layer in enumerate(shape.layers)
        if layer.mixer == "attention" and not layer.index_heads
        for name in ("q_proj", "k_proj", "q_norm", "k_norm")
    ]


def _change_rope(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters, rope: RopeConfig
) -> Hyperparameters:
    changed = shape.with_rope(rope)
    reason = None
    if _is_rope_off(gguf, spec) or not any(layer.has_rope for layer in shape.layers):
        reason = "it has no rotary embedding"
    elif rope.scaling in ("linear", "yarn") and changed.rope_scaling.factor == 1.0:
        reason = f"--rope-scaling {rope.scaling} needs --rope-scale, by what factor"
    elif shape.rope_scaling.kind == "longrope" and rope.to_dict().keys() - {"freq_base"}:
        reason = "its frequencies are stretched by tables of its own (LongRoPE)"
    elif rope.yarn_labels and changed.rope_scaling.kind != "yarn":
        reason = (
            f"{rope.yarn_labels} is of YaRN, which the file does not have; leave it out, or take "
            "--rope-scaling yarn"
        )
    elif cause := check_logit_scaling(changed.rope_scaling):
        reason = f"it would have {cause}, which is not supported for this architecture"
    elif any(layer.window for layer in shape.layers) and attention_factor(
        changed.rope_scaling
    ) != attention_factor(shape.rope_scaling):
        # YaRN scales queries and keys, for which all layers have one factor.
        reason = "layers with a sliding window would change too; use --rope-scaling linear"
    if reason is not None:
        raise UsageError(f"{gguf.path}: its rotary embedding cannot be changed so: {reason}")
    return changed


def make_config(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> DecoderConfig:
    layers = shape.layers
    is_scaled_by_width = len(layers) == spec.n_layers_scaled_by_width
    is_parallel = spec.is_parallel
    if spec.parallel_switch is not None:
        is_parallel = gguf.metadata.get_bool(f"{spec.name}.{spec.parallel_switch}")
    latent = shape.latent.heads if shape.latent else None
    head_dim = latent.head_dim if latent else shape.head_dim
    logit_dim = shape.model_dim / layers[0].n_heads if is_scaled_by_width else head_dim
    feed_forward = shape.feed_forward
    return DecoderConfig(
        architecture=spec.name,
        n_layers=len(layers),
        layers=layers,
        model_dim=shape.model_dim,
        n_heads=max(layer.n_heads for layer in layers),
        n_kv_heads=max(layer.n_kv_heads for layer in layers),
        head_dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        n_experts=feed_forward.n_experts,
        n_experts_used=feed_forward.n_experts_used,
        normalises_experts=feed_forward.is_normalised,
        shared_ffn_dim=feed_forward.shared_ffn_dim,
        has_shared_gate=spec.experts is not None and spec.experts.shared == "gated",
        has_expert_norms=spec.experts is not None
        and spec.experts.has_norms
        and feed_forward.n_experts > 0,
        routes_by_input=spec.experts is not None and spec.experts.reads_layer_input,
        scales_expert_inputs=spec.experts is not None and spec.experts.scales_inputs,
        experts_scale=_experts_scale(spec, shape),
        adjugate_ffn_dim=feed_forward.adjugate_dim,
        n_adjugate_sharers=feed_forward.n_adjugate_sharers,
        adjugate_scale=feed_forward.adjugate_scale,
        expert_gate=feed_forward.gate,
        expert_scale=feed_forward.scale,
        n_expert_groups=feed_forward.n_groups,
        n_expert_groups_used=feed_forward.n_groups_used,
        has_expert_bias=_has_expert_bias(gguf, spec),
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        n_positions=shape.context_length if _has_position_table(gguf, spec) else 0,
        norm_eps=shape.norm_eps,
        post_norm_eps=spec.post_norm_eps,
        norms_embeddings=spec.norms_embeddings,
        has_embedding_norm=spec.has_embedding_norm,
        has_token_type=spec.has_token_types and TYPES_TENSOR in gguf.tensors,
        has_output_norm=spec.has_output_norm,
        centres_norms=spec.norm == "layer",
        has_norm_weights=spec.has_norm_weights,
        has_norm_biases=spec.norm == "biased_rms",
        norm_placement=spec.norm_placement,
        has_second_norm=spec.has_optional_second_norm and SECOND_NORM in gguf.tensors,
        max_alibi_bias=_read_alibi(gguf.metadata, spec, len(layers)),
        is_parallel=is_parallel,
        has_parallel_norm=is_parallel and spec.has_parallel_norm,
        has_joint_bias=_has_joint_bias(gguf, spec),
        has_sub_norms=spec.has_sub_norms,
        has_head_gains=spec.has_head_gains,
        qk_norm=_qk_norm(gguf, spec),
        qk_norm_after_rope=spec.qk_norm_after_rope,
        norms_rotated=spec.norms_rotated and feed_forward.n_experts != spec.n_unnormed_experts,
        temperature_scale=shape.temperature_scale,
        temperature_period=shape.temperature_period if shape.temperature_scale else 0,
        temperature_offset=1 if spec.rope.unrotated_temperature else 0,
        grows_unrotated=spec.rope.unrotated_temperature is not None,
        activation=_read_activation(gguf.metadata, spec),
        attention_scale=(spec.attention_scale or _head_scale(spec, logit_dim or 1))
        * logit_factor(shape.rope_scaling),
        latent=latent,
        has_latent_key_norm=shape.latent is not None and shape.latent.norms_keys,
        norms_values=spec.norms_values,
        value_dim=0 if shape.value_dim == shape.head_dim else shape.value_dim,
        token_input_dim=shape.token_input_dim,
        token_input_rows=shape.token_input_rows,
        has_output_scale=spec.has_output_scale,
        has_streams=spec.streams is not None,
        laurel_rank=shape.laurel_rank,
        n_streams=shape.n_streams,
        stream_rank=shape.stream_rank,
        ngrams=shape.ngrams,
        output_gate=spec.output_gate,
        head_gate=spec.head_gate,
        embedding_scale=math.sqrt(shape.model_dim) if spec.scales_embedding_by_width else 1.0,
        tied_embeddings=OUTPUT_TENSOR not in gguf.tensors,
        has_output_bias=OUTPUT_BIAS in gguf.tensors,
        rope_attention_factor=attention_factor(shape.rope_scaling),
        passes=shape.passes,
        norms_passes=shape.norms_passes,
        has_two_states=shape.has_two_states,
        pooling=_read_pooling(gguf.metadata, spec),
        ranking=read_ranking(gguf, spec.name, shape.model_dim, spec.ranking)
        if spec.ranking
        else None,
        is_causal=spec.is_causal,
        dense_modules=read_dense_modules(gguf, shape.model_dim) if spec.has_dense_modules else (),
        **_read_frequencies(gguf, spec, shape),
    )


def _head_scale(spec: ArchitectureSpec, head_dim: float) -> float:
    return 1.0 / (head_dim if spec.scales_by_head_dim else math.sqrt(head_dim))


def _has_position_table(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    return spec.has_position_table is True or (
        spec.has_position_table == "optional" and POSITIONS_TENSOR in gguf.tensors
    )


def _read_alibi(metadata: Metadata, spec: ArchitectureSpec, n_layers: int) -> float:
    if spec.alibi_key == "none":
        return spec.max_alibi_bias if spec.alibi_depth in (None, n_layers) else 0.0
    key = f"{spec.name}.{ALIBI_KEY}"
    if key not in metadata and spec.alibi_key == "required":
        raise FormatError(
            f"metadata key {quote(key)} is missing, without which this architecture has no "
            "positions; convert the model anew with a newer llama.cpp"
        )
    bias = metadata.get_float(key, default=0.0, below=MAX_ALIBI_BIAS)
    if bias < 0.0:
        raise FormatError(f"metadata key {quote(key)} is {bias:g}, but must be 0 or above")
    return bias


def _read_activation(metadata: Metadata, spec: ArchitectureSpec) -> str:
    key = f"{spec.name}.{ACTIVATION_KEY}"
    if not spec.named_activations or key not in metadata:
        return spec.activation
    name = metadata.get_str(key)
    if name not in spec.named_activations:
        raise FormatError(
            f"metadata key {quote(key)} is {quote(name)}, which is not supported; supported: "
            f"{', '.join(spec.named_activations)}"
        )
    return spec.named_activations[name]


def _read_pooling(metadata: Metadata, spec: ArchitectureSpec) -> str:
    """What is not known is refused where vectors are asked for: texts are written all the same."""
    kind = metadata.get(f"{spec.name}.pooling_type", 0)
    return _POOLINGS.get(kind, "") if type(kind) is int else ""


def _has_joint_bias(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    """Whether Q, K and V have one vector of biases; others that are joined are taken apart."""
    name = blocks.FUSED_BIAS[0].name
    return FUSED_BIAS in gguf.tensors and any(rule.name == name for rule in spec.all_tensors)


def _qk_norm(
    gguf: ModelTensors, spec: ArchitectureSpec
) -> Literal["none", "head", "own_head", "projection", "layer"]:
    is_left_out = spec.has_optional_qk_norm and QK_NORM_TENSOR not in gguf.tensors
    return "none" if is_left_out else spec.qk_norm


def _has_expert_bias(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    if spec.experts is None or spec.experts.has_bias != "optional":
        return spec.experts is not None and spec.experts.has_bias is True
    has_bias = any(name.endswith(BIAS_TENSORS) for name in gguf.tensors)
    key = f"{spec.name}.{GATE_KEY}"
    if has_bias and spec.experts.gate == "file" and key not in gguf.metadata:
        raise FormatError(
            f"metadata key {quote(key)} is missing, but experts have biases: whether their gate is "
            "a softmax or a sigmoid is not said; convert the model anew with a newer llama.cpp"
        )
    return has_bias


def _experts_scale(spec: ArchitectureSpec, shape: Hyperparameters) -> float:
    halves = spec.experts is not None and spec.experts.halves_shared
    return 0.5 if halves and shape.feed_forward.shared_ffn_dim else 1.0


def _is_rope_off(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    switch = spec.rope_switch
    return switch is not None and not gguf.metadata.get_bool(f"{spec.name}.{switch}", default=True)


def _read_frequencies(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> dict[str, Any]:
    """The tables of RoPE frequencies of ``DecoderConfig``."""
    n_pairs = n_stored = shape.rotary_dim // 2
    if spec.windows is not None and spec.windows.halves_full_rotary:
        n_stored = max(n_pairs, shape.sliding_rotary_dim // 2)
    if _is_rope_off(gguf, spec):
        return {"rope_inv_freq": (0.0,) * n_pairs}

    def frequencies(factors: str | None) -> tuple[float, ...]:
        divisors = read_factors(gguf, factors, n_pairs, n_stored=n_stored) if factors else ()
        return inverse_frequencies(shape.rotary_dim, shape.rope_base, shape.rope_scaling, divisors)

    short, long = spec.long_rope_factors or (None, None)
    tables: dict[str, Any] = {"rope_inv_freq": frequencies(spec.rope_factors or short)}
    if long is not None and long in gguf.tensors:
        tables["long_rope_inv_freq"] = frequencies(long)
        tables["long_rope_after"] = shape.original_context
    if spec.windows is not None and any(layer.window for layer in shape.layers):
        base, scaling = shape.sliding_rope_base, shape.sliding_rope_scaling
        sliding = base, scaling, shape.sliding_rotary_dim
        is_other = sliding != (shape.rope_base, shape.rope_scaling, shape.rotary_dim)
        if is_other or spec.windows.has_own_heads:
            tables["sliding_rope_inv_freq"] = inverse_frequencies(
                shape.sliding_rotary_dim, base, scaling
            )
    return tables


def _depth_scales(spec: ArchitectureSpec, shape: Hyperparameters) -> dict[str, Any]:
    if spec.depth_scales is None:
        return {}
    return {
        "embedding_scale": spec.depth_scales.embedding,
        "residual_scale": spec.depth_scales.depth / math.sqrt(len(shape.layers)),
        "logit_scale": spec.depth_scales.base_width / shape.model_dim,
    }


def _optional_keys(spec: ArchitectureSpec) -> set[str]:
    """Keys with an effect that files of this architecture may have."""
    read = {*spec.scales.values(), *spec.divisors.values()}
    flags = {
        "rope.dimension_sections": spec.rope.has_sections,
        ROPE_PATTERN_KEY: spec.rope.has_pattern,
        ALPHA_KEY: spec.rope.is_extended,
        "rope.scaling.yarn_log_multiplier": spec.rope.has_log_multiplier,
        TEMPERATURE_KEY: spec.rope.has_temperature or spec.rope.unrotated_temperature is not None,
        SHARED_KV_KEY: spec.shares_kv,
        ALIBI_KEY: spec.alibi_key != "none",
        TOKEN_INPUT_KEY: spec.has_token_inputs or spec.mixes_streams,
        DRAFTING_KEY: spec.has_drafting_layers,
        LOOPS_KEY: spec.has_loops,
        NORMS_KEY: spec.hybrid is not None and not spec.hybrid.has_norms,
        SHARED_KEY: spec.experts is not None and spec.experts.shared not in ("none", "dense"),
        DENSE_KEY: spec.experts is not None and spec.experts.has_dense_layers,
        STEP_KEY: spec.experts is not None and spec.experts.goes_by_steps,
        LIMIT_KEY: spec.experts is not None
        and (spec.experts.has_gate_limits or spec.experts.has_output_limits),
        SHARED_LIMIT_KEY: spec.experts is not None and spec.experts.has_output_limits,
        GATE_KEY: spec.experts is not None and spec.experts.gate != "softmax",
        **dict.fromkeys(SCALE_KEYS, spec.experts is not None and spec.experts.has_scales),
    }
    return read | {key for key, is_read in flags.items() if is_read}


def _read_scales(metadata: Metadata, spec: ArchitectureSpec) -> dict[str, Any]:
    """Scales and soft caps of ``DecoderConfig`` that the file or the family sets."""
    scales: dict[str, Any] = dict(spec.default_soft_caps)
    for suffix in spec.required_scales:
        if f"{spec.name}.{suffix}" not in metadata:
            raise FormatError(
                f"metadata key {quote(f'{spec.name}.{suffix}')} is missing, without which this "
                "architecture cannot be computed; convert the model anew with a newer llama.cpp"
            )
    for keys, exponent in ((spec.scales, 1), (spec.divisors, -1)):
        for name, suffix in keys.items():
            key = f"{spec.name}.{suffix}"
            if key in metadata:
                scales[name] = metadata.get_float(key, above=0.0, below=1e6) ** exponent
    return scales
