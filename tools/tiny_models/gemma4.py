"""Keys of gemma4: heads of layers with a window, shared keys and values, inputs per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from tools.make_tiny_model import TinyModel


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


def add_experts(normal: Callable[..., None], prefix: str, model: TinyModel) -> None:
    """Experts beside a layer's feed-forward network, and their norms."""
    width, ffn_dim, n_experts = model.model_dim, model.expert_ffn_dim, model.n_experts
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        normal(f"{prefix}{name}.weight", width, std=0.1, mean=1.0)
    normal(f"{prefix}ffn_gate_inp.weight", n_experts, width, std=2.0)  # of rows by sqrt(width)
    normal(f"{prefix}ffn_gate_inp.scale", width, std=0.1, mean=1.0)
    normal(f"{prefix}ffn_gate_up_exps.weight", n_experts, 2 * ffn_dim, width, std=width**-0.5)
    normal(f"{prefix}ffn_down_exps.weight", n_experts, width, ffn_dim, std=ffn_dim**-0.5)
    normal(f"{prefix}ffn_down_exps.scale", n_experts, std=0.2, mean=1.0)
