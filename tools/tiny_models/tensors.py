"""Random tensors of tiny models: attention is peaked, and logits depend on the whole context."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tools.tiny_models import adapters, experts, gemma3n, gemma4, latent, mixed_streams, recurrent
from tools.tiny_models.drafting import drafting_tensors
from tools.tiny_models.fused import fuse_rows
from tools.tiny_models.model import TinyModel
from tools.tiny_models.normal_numbers import NormalNumbers
from tools.tiny_models.rope import LLAMA3_FACTOR, LONGROPE_FACTORS, llama3_factors

# Logits of attention get about this standard deviation: peaked, yet many keys count.
ATTENTION_LOGIT_STD = 1.5

Tensors = dict[str, NDArray[np.float32]]


def random_tensors(model: TinyModel) -> Tensors:
    """All tensors by GGUF name, as float32 [rows, cols] or [n]."""
    rng = NormalNumbers(model.seed)
    tensors: Tensors = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        values = mean + std * rng.standard_normal(shape)
        tensors[name] = values.astype(np.float32)

    _add_embeddings(normal, model)
    _add_rope_factors(tensors, model)
    if model.family.is_gemma3n:
        gemma3n.add_stacks(normal, model.model_dim)
    if model.input_dim:
        _add_token_inputs(normal, model)
    if model.family.mixes_streams:
        mixed_streams.add_table(normal, model)
    for layer in range(model.n_stored_layers):
        _add_layer(tensors, normal, model, layer)
    if model.dense_dim:
        for number, rows, cols in (
            (2, model.dense_dim, model.model_dim),
            (3, model.model_dim, model.dense_dim),
        ):
            normal(f"dense_{number}.weight", rows, cols, std=cols**-0.5)
    if n_labels := len(model.rank_labels):
        width = model.model_dim
        normal("cls.output.weight", n_labels, width, std=0.3)
        for name, shape, std, mean in (
            ("cls.weight", (width, width), width**-0.5, 0.0),
            ("cls.bias", (width,), 0.3, 0.0),
            ("cls.norm.weight", (width,), 0.1, 1.0),
            ("cls.output.bias", (n_labels,), 0.5, 0.0),
        ):
            if name in model.rank_tensors:
                normal(name, *shape, std=std, mean=mean)
    return tensors | drafting_tensors(rng, model, _add_layer)


def _add_embeddings(normal: Callable[..., None], model: TinyModel) -> None:
    """Embeddings, the output matrix and the norm before it."""
    family, width = model.family, model.model_dim
    std = 2.0 * width**-0.5
    normal("token_embd.weight", model.vocab_size, width, std=std)
    if family.has_sum_norms:
        normal("token_types.weight", 2, width, std=std)
    has_norm = family.has_shifted_networks or family.has_sum_norms or family.has_embedding_norm
    if has_norm or family.lacks_first_norm:
        normal("token_embd_norm.weight", width, std=0.1, mean=1.0)
    if has_norm:
        normal("token_embd_norm.bias", width, std=0.2)
    if family.has_position_table:
        normal("position_embd.weight", model.context_length, width, std=std)
    if not model.tied:
        normal("output.weight", model.vocab_size, width, std=std)
    if family.has_logit_biases:
        normal("output.bias", model.vocab_size, std=0.5)
    if family.has_two_stacks:
        normal("hrm.z_l_init", width, std=1.0)
    if family.mixes_streams:
        mixed_streams.add_mixer(normal, model, "output_hc", shares=False)
    elif family.has_norm_weights and not family.has_sum_norms:
        normal(f"{family.output_norm}.weight", width, std=0.1, mean=1.0)
    if family.has_norm_biases:
        normal(f"{family.output_norm}.bias", width, std=0.2)


def _add_rope_factors(tensors: Tensors, model: TinyModel) -> None:
    if model.rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(
            rope_base=model.rope_base,
            n_pairs=model.n_pairs,
            trained_context=model.context_length / LLAMA3_FACTOR,
            factor=LLAMA3_FACTOR,
        )
    if model.rope_scaling == "longrope":
        for name, (fastest, slowest) in LONGROPE_FACTORS.items():
            factors = np.linspace(fastest, slowest, model.n_pairs, dtype=np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
    if model.family.is_gemma4:
        factors = np.ones(model.n_pairs, np.float32)
        factors[model.n_pairs // 4 :] = 1e30
        tensors["rope_freqs.weight"] = factors


def _add_token_inputs(normal: Callable[..., None], model: TinyModel) -> None:
    """What makes the inputs of all layers of a token."""
    width = model.n_layers * model.input_dim
    normal("per_layer_token_embd.weight", model.vocab_size, width, std=model.input_dim**-0.5)
    normal("per_layer_model_proj.weight", width, model.model_dim, std=1.0)
    normal("per_layer_proj_norm.weight", model.input_dim, std=0.1, mean=1.0)


def _add_layer(tensors: Tensors, normal: Callable[..., None], model: TinyModel, layer: int) -> None:
    family = model.family
    prefix = f"blk.{layer}."
    _add_norms(normal, model, prefix)
    lacks_norm = family.lacks_first_norm and layer == 0
    if lacks_norm or (family.lacks_mixers and model.mixer(layer) == "none"):
        del tensors[f"{prefix}attn_norm.weight"]
    _add_matrices(normal, model, layer)
    if family.has_head_gains:
        normal(f"{prefix}attn_q_norm.weight", model.layers[layer][0], 1, std=0.3, mean=1.5)
        for name in ("attn_output.scale", "ffn_down.scale", "layer_output_scale.weight"):
            normal(f"{prefix}{name}", 1, std=0.2, mean=0.7)
    if family.has_sub_norms:
        _add_sub_norms(normal, model, layer)
    if family.mamba2 == "beside":  # its norm has a name of its own
        tensors[f"{prefix}ffn_norm"] = tensors.pop(f"{prefix}ffn_norm.weight")
    if family.is_gemma4:
        gemma4.add_layer(tensors, normal, model, layer)
    if family.is_gemma3n:
        gemma3n.add_layer(tensors, normal, model, layer)
    if family.mixes_streams:
        mixed_streams.add_layer(tensors, normal, model, layer)
    if dim := model.input_dim:
        width = model.model_dim
        normal(f"{prefix}inp_gate.weight", dim, width, std=width**-0.5)
        normal(f"{prefix}proj.weight", width, dim, std=dim**-0.5)
        normal(f"{prefix}post_norm.weight", width, std=0.1, mean=1.0)
    if model.has_experts(layer):
        experts.add_layer(tensors, normal, model, layer)
        if family.chooses_by_head:
            mixed_streams.add_indexer(normal, model, layer, model.layers[layer][1])
    if family.has_sinks or (family.has_window_sinks and model.pattern[layer]):
        normal(f"{prefix}attn_sinks.weight", model.layers[layer][0], std=1.0, mean=1.0)
    if family.chooses_adapters:
        adapters.add_layer(tensors, normal, model, layer)
    if family.fused_qkv or model.is_fused:
        fuse_rows(tensors, prefix, "attn_qkv", ("attn_q", "attn_k", "attn_v"))
    if family.fused_gate_up:
        fuse_rows(tensors, prefix, "ffn_up", ("ffn_gate", "ffn_up"))


def _add_norms(normal: Callable[..., None], model: TinyModel, prefix: str) -> None:
    """Norms of a branch's input and output."""
    family = model.family
    has_pre_norms = family.pre_norms and family.has_norm_weights
    has_second = family.is_parallel and family.has_parallel_norm and model.has_two_norms
    is_alone = family.mamba2 == "single" or family.has_only_mamba
    has_ffn_norm = has_pre_norms and not is_alone and not family.is_parallel
    for name, is_there in (
        ("attn_norm", has_pre_norms),
        ("attn_norm_2", has_second),
        (family.ffn_norm, has_ffn_norm),
        ("post_attention_norm", family.post_norms),
        ("post_ffw_norm", family.post_norms),
    ):
        if is_there:
            suffix = family.post_norm_suffix if name.startswith("post_") else ".weight"
            normal(f"{prefix}{name}{suffix}", model.model_dim, std=0.1, mean=1.0)
            if family.has_norm_biases:
                normal(f"{prefix}{name}.bias", model.model_dim, std=0.2)
    if family.has_sum_norms:
        for name in ("attn_output_norm", "layer_output_norm", "attn_norm_2")[
            : 2 + model.has_two_norms
        ]:
            normal(f"{prefix}{name}.weight", model.model_dim, std=0.1, mean=1.0)
            normal(f"{prefix}{name}.bias", model.model_dim, std=0.2)


def _add_matrices(normal: Callable[..., None], model: TinyModel, layer: int) -> None:
    """Matrices and biases of the mixer and of a dense feed-forward network."""
    family, width = model.family, model.model_dim
    prefix = f"blk.{layer}."
    *_, ffn_dim = model.layers[layer]
    mixer = model.mixer(layer)
    matrices: list[recurrent.Matrix] = []
    if family.is_latent and mixer == "attention":
        matrices = latent.add_latent_tensors(normal, layer, model, ATTENTION_LOGIT_STD)
    elif mixer.startswith("attention"):
        matrices = _add_attention(normal, model, layer)
    matrices += recurrent.add_layer(normal, prefix, model, mixer)
    if (
        ffn_dim and not family.has_shifted_networks
    ):  # a standard deviation of cols**-0.5 keeps the variance
        matrices += [
            ("ffn_gate", ffn_dim, width, width**-0.5),
            ("ffn_up", ffn_dim, width, width**-0.5),
            ("ffn_down", width, ffn_dim, ffn_dim**-0.5),
        ][family.mamba2 == "single" or family.is_ungated :]
    for name, rows, cols, std in matrices:
        normal(f"{prefix}{name}.weight", rows, cols, std=std)
        has_bias = model.biases and not name.startswith("ssm")
        has_bias |= family.qkv_biases and name in ("attn_q", "attn_k", "attn_v")
        has_bias |= family.has_output_biases and name == "attn_output"
        has_bias |= family.has_network_biases and name.startswith("ffn_")
        has_bias |= family.has_down_bias and name == "ffn_down"
        if has_bias:
            normal(f"{prefix}{name}.bias", rows, std=0.2)
        if model.has_scales:
            normal(f"{prefix}{name}.scale", 1, std=0.2, mean=1.0)


def _add_sub_norms(normal: Callable[..., None], model: TinyModel, layer: int) -> None:
    n_heads, _, ffn_dim = model.layers[layer]
    for name, size in (("attn", n_heads * model.head_dim), ("ffn", ffn_dim)):
        normal(f"blk.{layer}.{name}_sub_norm.weight", size, std=0.1, mean=1.0)


def _add_attention(
    normal: Callable[..., None], model: TinyModel, layer: int
) -> list[recurrent.Matrix]:
    """Adds the norms of queries and keys; returns the matrices."""
    family, width = model.family, model.model_dim
    n_heads, n_kv_heads, _ = model.layers[layer]
    head_dim = model.head_dims[layer]
    q_dim, kv_dim = n_heads * head_dim, n_kv_heads * head_dim
    value_dim = model.value_dim if family.has_other_values else head_dim
    norm_shapes = {
        "head": ((head_dim,), (head_dim,)),
        "own_head": ((n_heads, head_dim), (n_kv_heads, head_dim)),
        "projection": ((q_dim,), (kv_dim,)),
        "layer": ((q_dim,), (kv_dim,)),
    }
    if family.qk_norm is not None and model.has_qk_norm:
        shapes = norm_shapes[family.qk_norm]
        for name, shape in zip(("attn_q_norm", "attn_k_norm"), shapes, strict=True):
            normal(f"blk.{layer}.{name}.weight", *shape, std=0.1, mean=1.0)
            if family.qk_norm == "layer":
                normal(f"blk.{layer}.{name}.bias", *shape, std=0.2)
    std = (ATTENTION_LOGIT_STD / width) ** 0.5
    gate = []
    if family.output_gate is not None:
        rows = n_heads if family.output_gate == "per_head" else q_dim
        gate = [("attn_gate", rows, width, width**-0.5)]
    # Beside delta nets attention is gated: a query and a gate per head.
    return [
        *gate,
        ("attn_q", 2 * q_dim if family.has_delta_net else q_dim, width, std),
        ("attn_k", kv_dim, width, std),
        ("attn_v", n_kv_heads * value_dim, width, width**-0.5),
        ("attn_output", width, n_heads * value_dim, (n_heads * value_dim) ** -0.5),
    ]
