"""What gemma4 has beside a llama: heads of layers with a window, shared keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tools.tiny_models.model import TinyModel

Tensors = dict[str, NDArray[np.float32]]


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    sliding = model.head_dim_sliding or model.head_dim
    for key, value in {
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "attention.shared_kv_layers": model.n_shared_kv,
        "rope.dimension_count_swa": sliding,
        "embedding_length_per_layer_input": model.token_input_dim,
    }.items():
        writer.add_uint32(f"{model.architecture}.{key}", value)
    writer.add_sliding_window_pattern(model.pattern)
    if model.expert_ffn_dim:
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.n_experts_used)
        writer.add_expert_feed_forward_length(model.expert_ffn_dim)


def add_layer(tensors: Tensors, normal: Callable[..., None], model: TinyModel, layer: int) -> None:
    """Adds what only gemma4 has, and takes away what its layers share or do without."""
    prefix = f"blk.{layer}."
    # Logits are not divided by the root of the head size.
    tensors[f"{prefix}attn_q_norm.weight"] *= np.float32(model.head_dims[layer] ** -0.5)
    normal(f"{prefix}layer_output_scale.weight", 1, std=0.1, mean=0.9)
    if model.expert_ffn_dim:
        _add_experts(normal, prefix, model)
    if model.has_values_of_keys and not model.pattern[layer]:
        del tensors[f"{prefix}attn_v.weight"]
    if layer >= model.n_layers - model.n_shared_kv:
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            del tensors[f"{prefix}{name}.weight"]


def _add_experts(normal: Callable[..., None], prefix: str, model: TinyModel) -> None:
    """Experts beside a layer's feed-forward network, and their norms."""
    width, ffn_dim, n_experts = model.model_dim, model.expert_ffn_dim, model.n_experts
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        normal(f"{prefix}{name}.weight", width, std=0.1, mean=1.0)
    normal(f"{prefix}ffn_gate_inp.weight", n_experts, width, std=2.0)  # of rows by sqrt(width)
    normal(f"{prefix}ffn_gate_inp.scale", width, std=0.1, mean=1.0)
    normal(f"{prefix}ffn_gate_up_exps.weight", n_experts, 2 * ffn_dim, width, std=width**-0.5)
    normal(f"{prefix}ffn_down_exps.weight", n_experts, width, ffn_dim, std=ffn_dim**-0.5)
    normal(f"{prefix}ffn_down_exps.scale", n_experts, std=0.2, mean=1.0)
