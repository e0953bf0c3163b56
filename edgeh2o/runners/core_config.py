"""The configuration of a decoder as the core has it."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

from .. import _core
from ..errors import FormatError
from ..layer_config import LayerConfig
from ..model_config import DecoderConfig


# Sizes are asked for several times a request: 0.03 ms where 30 layers take 1.
@lru_cache(maxsize=8)
def core_config(config: DecoderConfig) -> _core.DecoderConfig:
    """The configuration as the core has it, which nothing changes.

    Raises FormatError for one that it refuses.
    """
    rope = {
        "inv_freq": config.rope_inv_freq,
        "attention_factor": config.rope_attention_factor,
        "long_inv_freq": config.long_rope_inv_freq,
        "long_after": config.long_rope_after,
    }
    ropes: list[dict[str, Any]] = [rope]
    if config.sliding_rope_inv_freq:
        ropes.append({"inv_freq": config.sliding_rope_inv_freq})
    if not all(layer.has_rope for layer in config.layers):
        ropes.append({"inv_freq": (0.0,) * len(config.rope_inv_freq)})
    shared = {
        "attention_soft_cap": config.attention_soft_cap,
        "max_alibi_bias": config.max_alibi_bias,
        "qk_norm": config.qk_norm,
        "qk_norm_after_rope": config.qk_norm_after_rope,
        "value_scale": config.value_scale,
        "norms_values": config.norms_values,
        "output_gate": config.output_gate,
        "head_gate": config.head_gate,
        "token_input_dim": config.token_input_dim,
        "has_output_scale": config.has_output_scale,
        "laurel_rank": config.laurel_rank,
        "temperature_scale": config.temperature_scale,
        "temperature_period": config.temperature_period,
        "temperature_offset": config.temperature_offset,
        "ffn": "experts" if config.n_experts else "gated",
        "activation": config.activation,
        "n_experts": config.n_experts,
        "n_experts_used": config.n_experts_used,
        "normalises_experts": config.normalises_experts,
        "expert_scale": config.expert_scale,
        "n_expert_groups": config.n_expert_groups,
        "n_expert_groups_used": config.n_expert_groups_used,
        "shared_ffn_dim": config.shared_ffn_dim,
        "has_shared_gate": config.has_shared_gate,
        "has_expert_norms": config.has_expert_norms,
        "routes_by_input": config.routes_by_input,
        "scales_expert_inputs": config.scales_expert_inputs,
        "adjugate_ffn_dim": config.adjugate_ffn_dim,
        "n_adjugate_sharers": config.n_adjugate_sharers,
        "adjugate_scale": config.adjugate_scale,
        "experts_scale": config.experts_scale,
        "expert_gate": config.expert_gate,
        "has_expert_bias": config.has_expert_bias,
        "norm_placement": config.norm_placement,
        "has_second_norm": config.has_second_norm,
        "is_parallel": config.is_parallel,
        "has_parallel_norm": config.has_parallel_norm,
        "qkv_limit": config.qkv_limit,
        "has_joint_bias": config.has_joint_bias,
        "has_sub_norms": config.has_sub_norms,
        "has_head_gains": config.has_head_gains,
        "residual_scale": config.residual_scale,
        "is_causal": config.is_causal,
    }
    if config.latent is not None:
        sizes = asdict(config.latent)
        shared |= {"values_are_keys": True, **{f"latent_{k}": v for k, v in sizes.items()}}
        shared["has_latent_key_norm"] = config.has_latent_key_norm
    # Most are alike, and it takes as long to describe one as to have the core read it.
    kinds = dict.fromkeys(config.layers)
    layers = {layer: {**shared, **_core_layer(layer, config)} for layer in kinds}
    try:
        return _core.DecoderConfig(
            model_dim=config.model_dim,
            vocab_size=config.vocab_size,
            norm_eps=config.norm_eps,
            post_norm_eps=config.post_norm_eps,
            centres_norms=config.centres_norms,
            has_norm_weights=config.has_norm_weights,
            has_norm_biases=config.has_norm_biases,
            has_output_norm=config.has_output_norm,
            ropes=ropes,
            layers=[layers[layer] for layer in config.own_layers],
            passes=list(config.passes),
            norms_passes=config.norms_passes,
            has_two_states=config.has_two_states,
            embedding_scale=config.embedding_scale,
            norms_embeddings=config.norms_embeddings,
            has_embedding_norm=config.has_embedding_norm,
            has_token_type=config.has_token_type,
            logit_scale=config.logit_scale,
            logit_soft_cap=config.logit_soft_cap,
            tied_embeddings=config.tied_embeddings,
            has_output_bias=config.has_output_bias,
            token_input_rows=config.token_input_rows,
            update_rank=config.update_rank,
            adapter_scales=config.adapter_scales or (0.0,) * len(config.adapter_tokens),
            adapter_tokens=config.adapter_tokens,
            adapter_gain=config.adapter_gain,
            has_streams=config.has_streams,
            n_streams=config.n_streams,
            stream_rank=config.stream_rank,
            ngrams=asdict(config.ngrams) if config.ngrams else {},
            reads_hidden=config.reads_hidden,
            n_guessed=config.n_guessed,
            hidden_join=config.hidden_join,
            hidden_dim=config.hidden_dim,
            features_dim=config.features_dim,
            norms_features=config.norms_features,
            residual_is_normed=config.residual_is_normed,
            n_positions=config.n_positions,
        )
    except ValueError as error:
        raise FormatError(f"the model cannot be run: {error}") from None


def _core_layer(layer: LayerConfig, config: DecoderConfig) -> dict[str, Any]:
    """What the core is told of one layer; ``rope`` is the number of its table."""
    fields = asdict(layer)
    fields |= {f"xielu_{name}": value for name, value in fields.pop("xielu").items()}
    if layer.gate_cutoff is None:
        del fields["gate_cutoff"]
    if own := fields.pop("latent"):
        fields |= {f"latent_{name}": value for name, value in own.items()}
    fields["attention_scale"] = layer.attention_scale or config.attention_scale
    head_dim = fields.pop("head_dim") or config.head_dim
    value_dim = layer.head_dim or config.value_dim or config.head_dim
    fields["key_dim"] = head_dim if layer.n_heads else 0
    fields["value_dim"] = value_dim if layer.n_heads else 0
    if config.latent is not None and not layer.n_heads:
        fields.update(values_are_keys=False, latent_rank=0, has_latent_key_norm=False)
    if fields.pop("is_dense") or not layer.ffn_dim:
        ffn = "gated" if layer.ffn_dim else "none"
        fields.update(ffn=ffn, n_experts=0, n_experts_used=0, has_expert_bias=False)
        fields.update(shared_ffn_dim=0, n_expert_groups=1, n_expert_groups_used=1)
        fields.update(has_expert_norms=False, routes_by_input=False, experts_scale=1.0)
        fields.update(scales_expert_inputs=False, adjugate_ffn_dim=0)
    if fields.pop("has_shifted_network"):
        fields.update(ffn="shifted")
    if config.norms_rotated and layer.has_rope:
        fields.update(qk_norm="head", has_plain_qk_norm=True)
    if config.grows_unrotated and layer.has_rope:
        fields.update(temperature_scale=0.0, temperature_period=0, temperature_offset=0)
    if not fields.pop("has_rope"):
        return {**fields, "rope": 1 + bool(config.sliding_rope_inv_freq)}
    return {**fields, "rope": int(layer.window > 0 and bool(config.sliding_rope_inv_freq))}
