"""How an architecture reads a model file: a declarative table, and the one reader that uses it.

A family is an ``ArchitectureSpec`` passed to ``register_architecture``: no code, only the names
of its tensors, the sizes of their dimensions and a few flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import FormatError, UsageError
from ..formats.fingerprint import fingerprint_weights
from ..formats.metadata import Metadata, quote
from ..formats.model_tensors import ModelTensors
from ..model_config import DecoderConfig
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .experts import BIAS_TENSOR, DENSE_KEY, GATE_KEY, SCALE_KEYS, SHARED_KEY, ExpertRule
from .families import import_families, import_family
from .hybrids import HybridRule
from .hyperparameters import (
    DRAFTING_KEY,
    SHARED_KV_KEY,
    TOKEN_INPUT_KEY,
    Hyperparameters,
    read_hyperparameters,
)
from .key_biases import mark_key_biases
from .latent import LatentRule
from .latent_tensors import ALL_TENSORS, latent_tensors
from .refusals import refuse_unread
from .rope import PATTERN_KEY as ROPE_PATTERN_KEY
from .rope import (
    PLAIN_ROPE,
    RopeRule,
    attention_factor,
    check_logit_scaling,
    inverse_frequencies,
    logit_factor,
    read_factors,
)
from .streams import StreamRule
from .tensors import TensorBinding, TensorRule, bind_tensors
from .windows import SlidingWindows
from .xielu import with_xielu

OUTPUT_TENSOR, OUTPUT_BIAS = "output.weight", "output.bias"
QK_NORM_TENSOR = "blk.0.attn_q_norm.weight"
FUSED_TENSOR, FUSED_BIAS = "blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthScales:
    """Scales of a family without keys for them (MiniCPM 3).

    Embeddings are multiplied by ``embedding``, what a branch adds by ``depth / sqrt(n_layers)``,
    and logits by ``base_width / model_dim``.
    """

    embedding: float
    depth: float
    base_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """How files of one ``general.architecture`` are read.

    Attributes:
        qk_row_order: how pairs of rotated rows lie in the file.
        has_norm_weights, has_parallel_norm: see ``DecoderConfig``.
        parallel_switch: key, after the architecture's name, that files say ``is_parallel`` by.
        fused_tensors: the tensors of files whose Q, K and V are one matrix, if others have three.
        norm_placement, is_parallel, qk_norm, qk_norm_after_rope, activation: see ``DecoderConfig``.
        has_optional_qk_norm: files may lack the norms of queries and keys.
        norm: "rms" norms, also with biases ("biased_rms"), or "layer" norms, which may have some.
        rope: which layers have a rotary embedding, and what else files say of it.
        rope_factors: optional tensor of frequency divisors.
        long_rope_factors: optional tensors of frequency divisors for sessions within the original
            context and beyond it.
        rope_switch: key, after the architecture's name, that turns the rotary embedding off if it
            is false.
        windows: None: the family has no sliding windows.
        hybrid: None: every layer has attention.
        latent: None: attention is not of the latent kind; else its tensors are not in ``tensors``.
        experts: None: the feed-forward network is one, not a mixture of experts.
        scales: keys that set a scale or soft cap of ``DecoderConfig``.
        divisors: keys whose inverse is a scale of ``DecoderConfig``.
        required_scales: those of both that a file must have.
        default_soft_caps: soft caps of files without the key.
        scales_embedding_by_width: embeddings are multiplied by ``sqrt(model_dim)``.
        depth_scales: scales that follow from width and depth, which files do not say; None: none.
        attention_scale: factor of attention logits; None: one over the root of the head size.
        norms_values, has_sinks, has_output_scale, has_output_gate: see ``DecoderConfig``.
        shares_kv: the last layers may read the keys and values of others.
        has_token_inputs: layers may have inputs of their own per token.
        streams: None: every token has one residual stream.
        has_drafting_layers: files may have layers behind the last that guess tokens ahead. They are
            left out: nothing that they compute goes into the answer.
        n_layers_scaled_by_width: the model of the family with so many layers divides attention
            logits by ``sqrt(model_dim / n_heads)``, not by the root of the head size.
    """

    name: str
    tensors: tuple[TensorRule, ...]
    qk_row_order: Literal["interleaved", "half_split"]
    activation: str
    norm: Literal["rms", "biased_rms", "layer"] = "rms"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    has_norm_weights: bool = True
    is_parallel: bool = False
    has_parallel_norm: bool = False
    parallel_switch: str | None = None
    fused_tensors: tuple[TensorRule, ...] = ()
    qk_norm: Literal["none", "head", "projection"] = "none"
    qk_norm_after_rope: bool = False
    has_optional_qk_norm: bool = False
    rope: RopeRule = PLAIN_ROPE
    rope_factors: str | None = None
    long_rope_factors: tuple[str, str] | None = None
    rope_switch: str | None = None
    windows: SlidingWindows | None = None
    hybrid: HybridRule | None = None
    latent: LatentRule | None = None
    experts: ExpertRule | None = None
    scales: Mapping[str, str] = field(default_factory=dict)
    divisors: Mapping[str, str] = field(default_factory=dict)
    required_scales: tuple[str, ...] = ()
    default_soft_caps: Mapping[str, float] = field(default_factory=dict)
    scales_embedding_by_width: bool = False
    depth_scales: DepthScales | None = None
    attention_scale: float | None = None
    norms_values: bool = False
    has_sinks: bool = False
    has_output_scale: bool = False
    has_output_gate: bool = False
    shares_kv: bool = False
    has_token_inputs: bool = False
    streams: StreamRule | None = None
    has_drafting_layers: bool = False
    n_layers_scaled_by_width: int | None = None

    @property
    def all_tensors(self) -> tuple[TensorRule, ...]:
        """Those of all files together."""
        latent = ALL_TENSORS if self.latent is not None else ()
        return (*self.tensors, *self.fused_tensors, *latent)

    def read_shape(self, metadata: Metadata) -> Hyperparameters:
        """The hyperparameters of a file. Raises ``FormatError`` that names the key."""
        shape = read_hyperparameters(
            metadata,
            self.name,
            self.windows,
            experts=self.experts,
            rope=self.rope,
            shares_kv=self.shares_kv,
            has_token_inputs=self.has_token_inputs,
            streams=self.streams,
            hybrid=self.hybrid,
            has_drafting_layers=self.has_drafting_layers,
            latent=self.latent,
            has_layer_norm=self.norm == "layer",
        )
        if self.activation != "xielu":
            return shape
        return replace(shape, layers=with_xielu(metadata, shape.layers))

    def rules(self, shape: Hyperparameters, *, is_fused: bool = False) -> tuple[TensorRule, ...]:
        """The tensors of files of this shape, whose Q, K and V may be one matrix."""
        tensors = self.fused_tensors if is_fused and self.fused_tensors else self.tensors
        return tensors + (latent_tensors(shape.latent) if shape.latent else ())


_ARCHITECTURES: dict[str, ArchitectureSpec] = {}


def register_architecture(spec: ArchitectureSpec) -> ArchitectureSpec:
    """Lets ``read_model`` accept files of this architecture. Raises ValueError for a known name."""
    if spec.name in _ARCHITECTURES:
        raise ValueError(f"architecture {spec.name!r} is registered already")
    _ARCHITECTURES[spec.name] = spec
    return spec


def registered_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be read, sorted."""
    import_families()
    return tuple(sorted(_ARCHITECTURES))


def find_architecture(name: str) -> ArchitectureSpec:
    """The table of an architecture. Raises ``FormatError`` for one that is not registered."""
    if name not in _ARCHITECTURES:
        import_family(name)
    spec = _ARCHITECTURES.get(name)
    if spec is None:
        raise FormatError(
            f"architecture {quote(name)} (metadata key 'general.architecture') is not supported; "
            f"supported: {', '.join(registered_architectures())}"
        )
    return spec


def read_model(
    gguf: ModelTensors, rope: RopeConfig = ROPE_OF_FILE
) -> tuple[DecoderConfig, list[TensorBinding]]:
    """Checks a file against its architecture; returns its configuration and its weights.

    ``rope`` changes the rotary embedding. Bindings are in file order. Raises ``FormatError`` that
    names the key or the tensor, and ``UsageError`` for a ``rope`` that the model cannot have.
    """
    try:
        spec = find_architecture(gguf.metadata.get_str("general.architecture"))
        shape = spec.read_shape(gguf.metadata)
        refuse_unread(gguf.metadata, spec.name, _optional_keys(spec))
        factors = [name for name in (spec.rope_factors, *(spec.long_rope_factors or ())) if name]
        n_layers = len(shape.layers)
        drafting = tuple(f"blk.{n_layers + i}." for i in range(shape.n_drafting_layers))
        left_out = [name for name in gguf.tensors if drafting and name.startswith(drafting)]
        bindings = bind_tensors(
            gguf.tensors,
            spec.rules(shape, is_fused=FUSED_TENSOR in gguf.tensors),
            shape,
            architecture=spec.name,
            interleaved=spec.qk_row_order == "interleaved",
            read_elsewhere=[*factors, *left_out],
        )
        if cause := check_logit_scaling(shape.rope_scaling):
            raise FormatError(f"{cause} is not supported for the architecture {spec.name!r}")
        if rope != ROPE_OF_FILE:
            shape = _change_rope(gguf, spec, shape, rope)
        config = replace(
            _make_config(gguf, spec, shape),
            **_depth_scales(spec, shape),
            **_read_scales(gguf.metadata, spec),
            fingerprint=fingerprint_weights(gguf),
        )
        return mark_key_biases(config, gguf, bindings), bindings
    except FormatError as error:
        raise FormatError(f"{gguf.path}: {error}") from None


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


def _make_config(
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
        expert_gate=feed_forward.gate,
        expert_scale=feed_forward.scale,
        n_expert_groups=feed_forward.n_groups,
        n_expert_groups_used=feed_forward.n_groups_used,
        has_expert_bias=_has_expert_bias(gguf, spec),
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        norm_eps=shape.norm_eps,
        centres_norms=spec.norm == "layer",
        has_norm_weights=spec.has_norm_weights,
        has_norm_biases=spec.norm == "biased_rms",
        norm_placement=spec.norm_placement,
        is_parallel=is_parallel,
        has_parallel_norm=is_parallel and spec.has_parallel_norm,
        has_joint_bias=FUSED_BIAS in gguf.tensors,
        qk_norm=_qk_norm(gguf, spec),
        qk_norm_after_rope=spec.qk_norm_after_rope,
        temperature_scale=shape.temperature_scale,
        temperature_period=shape.original_context if shape.temperature_scale else 0,
        activation=spec.activation,
        attention_scale=(spec.attention_scale or 1.0 / math.sqrt(logit_dim))
        * logit_factor(shape.rope_scaling),
        latent=latent,
        norms_values=spec.norms_values,
        has_sinks=spec.has_sinks,
        token_input_dim=shape.token_input_dim,
        token_input_rows=shape.token_input_rows,
        has_output_scale=spec.has_output_scale,
        has_streams=spec.streams is not None,
        laurel_rank=shape.laurel_rank,
        has_output_gate=spec.has_output_gate,
        embedding_scale=math.sqrt(shape.model_dim) if spec.scales_embedding_by_width else 1.0,
        tied_embeddings=OUTPUT_TENSOR not in gguf.tensors,
        has_output_bias=OUTPUT_BIAS in gguf.tensors,
        rope_attention_factor=attention_factor(shape.rope_scaling),
        **_read_frequencies(gguf, spec, shape),
    )


def _qk_norm(gguf: ModelTensors, spec: ArchitectureSpec) -> Literal["none", "head", "projection"]:
    is_left_out = spec.has_optional_qk_norm and QK_NORM_TENSOR not in gguf.tensors
    return "none" if is_left_out else spec.qk_norm


def _has_expert_bias(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    if spec.experts is None or spec.experts.has_bias != "optional":
        return spec.experts is not None and spec.experts.has_bias is True
    has_bias = any(name.endswith(BIAS_TENSOR) for name in gguf.tensors)
    key = f"{spec.name}.{GATE_KEY}"
    if has_bias and spec.experts.gate == "file" and key not in gguf.metadata:
        raise FormatError(
            f"metadata key {quote(key)} is missing, but experts have biases: whether their gate is "
            "a softmax or a sigmoid is not said; convert the model anew with a newer llama.cpp"
        )
    return has_bias


def _is_rope_off(gguf: ModelTensors, spec: ArchitectureSpec) -> bool:
    switch = spec.rope_switch
    return switch is not None and not gguf.metadata.get_bool(f"{spec.name}.{switch}", default=True)


def _read_frequencies(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> dict[str, Any]:
    """The tables of RoPE frequencies of ``DecoderConfig``."""
    n_pairs = shape.rotary_dim // 2
    if _is_rope_off(gguf, spec):
        return {"rope_inv_freq": (0.0,) * n_pairs}

    def frequencies(factors: str | None) -> tuple[float, ...]:
        divisors = read_factors(gguf, factors, n_pairs) if factors else ()
        return inverse_frequencies(shape.rotary_dim, shape.rope_base, shape.rope_scaling, divisors)

    short, long = spec.long_rope_factors or (None, None)
    tables: dict[str, Any] = {"rope_inv_freq": frequencies(spec.rope_factors or short)}
    if long is not None and long in gguf.tensors:
        tables["long_rope_inv_freq"] = frequencies(long)
        tables["long_rope_after"] = shape.original_context
    if spec.windows is not None and any(layer.window for layer in shape.layers):
        base, scaling = shape.sliding_rope_base, shape.sliding_rope_scaling
        is_other = (base, scaling) != (shape.rope_base, shape.rope_scaling)
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
        "rope.scaling.yarn_log_multiplier": spec.rope.has_log_multiplier,
        "attention.temperature_scale": spec.rope.has_temperature,
        SHARED_KV_KEY: spec.shares_kv,
        TOKEN_INPUT_KEY: spec.has_token_inputs,
        DRAFTING_KEY: spec.has_drafting_layers,
        SHARED_KEY: spec.experts is not None and spec.experts.shared not in ("none", "dense"),
        DENSE_KEY: spec.experts is not None and spec.experts.has_dense_layers,
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
