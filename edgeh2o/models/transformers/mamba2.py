"""Models of transformers with Mamba-2 beside or between layers that attend: see ``families.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from .family import BASE, TransformersFamily
from .mixtures import GRANITE_EXPERTS, GRANITE_KEYS, granite_shared
from .recurrent import integers, set_attending
from .settings import Settings
from .sources import Factors, Source, Sources

_PREFIX = "model.layers.{layer}."


def _mamba2(name: str) -> Mapping[str, Sources]:
    prefix = f"{_PREFIX}{name}."
    return {
        "blk.{layer}.ssm_in": prefix + "in_proj",
        "blk.{layer}.ssm_conv1d": prefix + "conv1d",
        "blk.{layer}.ssm_dt.bias": Source(name=prefix + "dt_bias"),
        "blk.{layer}.ssm_a": Source(name=prefix + "A_log", change="minus_exp"),
        "blk.{layer}.ssm_d": Source(name=prefix + "D"),
        "blk.{layer}.ssm_norm": prefix + "norm",
        "blk.{layer}.ssm_out": prefix + "out_proj",
    }


_ATTENDING = ("attention", "full_attention")
# What others write the infinite end of a range as.
_NO_LIMIT = ([0.0, math.inf], [0, math.inf], [0.0, {"__float__": "Infinity"}], None)
_UNUSED = ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank")


def _state_sizes(settings: Settings, inner_size: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": settings.integer("mamba_d_conv", default=4),
        "ssm.state_size": settings.integer("mamba_d_state", default=256),
        "ssm.group_count": settings.integer("mamba_n_groups", default=1),
        "ssm.time_step_rank": settings.integer("mamba_n_heads", default=128),
        "ssm.inner_size": inner_size,
    }


def _read_granite(settings: Settings, keys: dict[str, Any]) -> None:
    kinds = settings.take("layer_types")
    if kinds is None:
        raise FormatError(f"{settings.label('layer_types')} is missing")
    set_attending(keys, [kind in _ATTENDING for kind in kinds])
    keys["rope.scaling.finetuned"] = settings.take("position_embedding_type") == "rope"
    inner_size = settings.integer("mamba_expand", default=2) * keys["embedding_length"]
    keys |= _state_sizes(settings, inner_size)
    width = settings.integer("shared_intermediate_size", default=1024)
    n_experts = settings.count("num_experts", default=8)
    if n_experts:
        keys |= {
            "expert_count": n_experts,
            "expert_used_count": settings.integer("num_experts_per_tok"),
            "expert_shared_feed_forward_length": width,
        }
    else:  # the shared network is the only one
        settings.take("num_experts_per_tok")
        keys["feed_forward_length"] = width


def _read_nemotron(settings: Settings, keys: dict[str, Any]) -> None:
    n_layers = keys["block_count"]
    words = ("mamba", "linear_attention", *_ATTENDING, "mlp")
    kinds = settings.kinds("layers_block_type", n_layers, words)
    pattern = settings.take("hybrid_override_pattern")
    if kinds is None:
        letters = {"M": "mamba", "*": "attention", "-": "mlp"}
        if not isinstance(pattern, str) or len(pattern) != n_layers or set(pattern) - {*letters}:
            raise FormatError(
                f"{settings.label('hybrid_override_pattern')} must have a letter for each of "
                f"{n_layers} layers, {' or '.join(letters)}; mixtures of experts run as GGUF files"
            )
        kinds = [letters[letter] for letter in pattern]
    n_heads = settings.integer("mamba_num_heads")
    set_attending(keys, [kind in _ATTENDING for kind in kinds])
    width = keys["feed_forward_length"]
    keys |= {
        "feed_forward_length": integers([width * (kind == "mlp") for kind in kinds]),
        "ssm.conv_kernel": settings.integer("conv_kernel", default=4),
        "ssm.state_size": settings.integer("ssm_state_size", default=128),
        "ssm.group_count": settings.integer("n_groups", default=8),
        "ssm.time_step_rank": n_heads,
        "ssm.inner_size": n_heads * settings.integer("mamba_head_dim"),
    }


def _read_falcon(settings: Settings, keys: dict[str, Any]) -> Mapping[str, Factors]:
    keys |= _state_sizes(settings, settings.integer("mamba_d_ssm", default=1024))
    if settings.flag("mamba_rms_norm"):
        settings.require("mamba_norm_before_gate", (False,))
    settings.take("mamba_norm_before_gate")

    def factor(name: str) -> float:
        return settings.number(name, default=1.0)

    def factors(name: str, count: int) -> list[float]:
        if settings.take(name) is None:
            return [1.0] * count
        return settings.numbers(name, count)

    gate, down = factors("mlp_multipliers", 2)
    attention_in, ssm_in = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    parts = factors("ssm_multipliers", 5)
    sizes = ("ssd_inner_dim", "ssd_inner_dim", "ssd_bc_dim", "ssd_bc_dim", "n_ssd_heads")
    return {
        "embedding": [("", factor("embedding_multiplier"))],
        "output": [("", factor("lm_head_multiplier"))],
        "attention_in": [("", attention_in)],
        "key": [("", attention_in * factor("key_multiplier"))],
        "attention_out": [("", factor("attention_out_multiplier"))],
        "gate": [("", gate)],
        "down": [("", down)],
        "ssm_in": [(size, ssm_in * part) for size, part in zip(sizes, parts, strict=True)],
        "ssm_out": [("", factor("ssm_out_multiplier"))],
    }


def _multiplied(factors: str, name: str) -> Source:
    return Source(name=f"{_PREFIX}{name}.weight", factors=factors)


_FALCON: Mapping[str, Sources] = {
    **_mamba2("mamba"),
    "token_embd.weight": Source(name="model.embed_tokens.weight", factors="embedding"),
    "output_norm": "model.final_layernorm",
    "output.weight": (
        Source(name="lm_head.weight", factors="output"),
        Source(name="model.embed_tokens.weight", factors="output"),
    ),
    "blk.{layer}.attn_norm": _PREFIX + "input_layernorm",
    "blk.{layer}.ffn_norm": Source(name=_PREFIX + "pre_ff_layernorm.weight"),
    "blk.{layer}.attn_q.weight": _multiplied("attention_in", "self_attn.q_proj"),
    "blk.{layer}.attn_k.weight": _multiplied("key", "self_attn.k_proj"),
    "blk.{layer}.attn_v.weight": _multiplied("attention_in", "self_attn.v_proj"),
    "blk.{layer}.attn_output.weight": _multiplied("attention_out", "self_attn.o_proj"),
    "blk.{layer}.ffn_gate.weight": _multiplied("gate", "feed_forward.gate_proj"),
    "blk.{layer}.ffn_up": _PREFIX + "feed_forward.up_proj",
    "blk.{layer}.ffn_down.weight": _multiplied("down", "feed_forward.down_proj"),
    "blk.{layer}.ssm_in.weight": _multiplied("ssm_in", "mamba.in_proj"),
    "blk.{layer}.ssm_out.weight": _multiplied("ssm_out", "mamba.out_proj"),
}

MAMBA2: Mapping[str, TransformersFamily] = {
    "falcon_h1": TransformersFamily(
        architecture="falcon-h1",
        tensors=_FALCON,
        values={
            "time_step_limit": _NO_LIMIT,
            "mamba_proj_bias": (False, None),
            "projectors_bias": (False, None),
            "mamba_use_mlp": (True, None),
            "attn_layer_indices": (None,),
        },
        ignored=("mamba_chunk_size", "mamba_d_head", "mamba_expand", "mamba_conv_bias", *_UNUSED),
        unties=True,
        read_more=_read_falcon,
    ),
    "granitemoehybrid": TransformersFamily(
        architecture="granitehybrid",
        tensors={
            **BASE,
            **_mamba2("mamba"),
            **GRANITE_EXPERTS,
            **granite_shared(""),
            **granite_shared("_shexp"),
        },
        keys=GRANITE_KEYS,
        values={
            "time_step_limit": _NO_LIMIT,
            "mamba_conv_bias": (True, False),
            "mamba_proj_bias": (False, None),
            "position_embedding_type": ("nope", "rope", None),
            "normalization_function": ("rmsnorm", None),
        },
        ignored=("mamba_chunk_size", "mamba_d_head", "init_method", *_UNUSED),
        layer_types=("mamba", "linear_attention", "attention"),
        read_more=_read_granite,
    ),
    "nemotron_h": TransformersFamily(
        architecture="nemotron_h",
        tensors={
            "token_embd": "model.embeddings",
            "output_norm": "model.norm_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": _PREFIX + "norm",
            "blk.{layer}.attn_q": _PREFIX + "mixer.q_proj",
            "blk.{layer}.attn_k": _PREFIX + "mixer.k_proj",
            "blk.{layer}.attn_v": _PREFIX + "mixer.v_proj",
            "blk.{layer}.attn_output": _PREFIX + "mixer.o_proj",
            "blk.{layer}.ffn_up": _PREFIX + "mixer.up_proj",
            "blk.{layer}.ffn_down": _PREFIX + "mixer.down_proj",
            **_mamba2("mixer"),
        },
        activations=("relu2",),
        renamed={
            "layer_norm_epsilon": "rms_norm_eps",
            "mlp_hidden_act": "hidden_act",
            "norm_eps": "rms_norm_eps",
            "attention_head_dim": "head_dim",
        },
        values={
            "time_step_limit": _NO_LIMIT,
            "mamba_hidden_act": ("silu", None),
            "mamba_proj_bias": (False, None),
            "use_bias": (False, None),
            "residual_in_fp32": (False, None),
            "sliding_window": (None,),
            "expand": (2, None),
        },
        ignored=(
            *("chunk_size", "rescale_prenorm_residual", "use_conv_bias", "use_mamba_kernels"),
            *("mamba_ssm_cache_dtype", "mamba_dt_init", "mamba_d_conv", "num_nextn_predict_layers"),
            # Of mixtures of experts, which no layer is.
            *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"),
            *("routed_scaling_factor", "moe_intermediate_size", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
            *("num_experts_per_tok", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
            *_UNUSED,
        ),
        read_more=_read_nemotron,
        prefixes={"backbone.": "model."},
        left_out=("mtp.",),
    ),
}
