"""Latent attention of tiny models: what their files say of it, and its tensors."""

from __future__ import annotations

from collections.abc import Callable

from gguf import ExpertGatingFuncType, GGUFWriter

from tools.tiny_models.model import TinyModel
from tools.tiny_models.recurrent import Matrix

EXPERT_SCALE = 1.7


def add_latent_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    """Writes the sizes of heads, and what files of deepseek2 say of their experts."""
    is_deepseek = model.family.has_experts
    n_heads, *_ = model.layers[0]
    head_dim = model.nope_dim + model.rope_dim
    writer.add_kv_lora_rank(model.kv_rank)
    if model.q_rank:
        writer.add_q_lora_rank(model.q_rank)
    if is_deepseek and model.has_matrices_per_head:
        writer.add_head_count_kv(
            [int(model.mixer(layer) == "attention") for layer in range(model.n_layers)]
            if model.family.has_row_decays
            else 1
        )
        writer.add_key_length(model.kv_rank + model.rope_dim)
        writer.add_value_length(model.kv_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(model.value_dim)
    else:
        writer.add_head_count_kv(n_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(model.value_dim)
    if model.family.has_sliding_latent:
        prefix = f"{model.architecture}.attention"
        for key, value in (
            ("kv_lora_rank_swa", model.sliding_kv_rank),
            ("key_length_swa", model.sliding_kv_rank + model.rope_dim),
            ("value_length_swa", model.sliding_kv_rank),
            ("key_length_mla_swa", model.sliding_nope_dim + model.rope_dim),
            ("value_length_mla_swa", model.sliding_value_dim),
        ):
            writer.add_uint32(f"{prefix}.{key}", value)
        types = [model.has_indexer(layer) for layer in range(model.n_layers)]
        writer.add_array(f"{prefix}.indexer.types", types)
    if model.family.is_indexed:
        writer.add_indexer_head_count(model.index_heads)
        writer.add_indexer_key_length(model.index_key_dim)
        writer.add_indexer_top_k(model.index_top_k)
        if model.indexer_period > 1:
            key = f"{model.architecture}.attention.indexer.types"
            writer.add_array(key, [model.has_indexer(i) for i in range(model.n_layers)])
    if not is_deepseek:
        return
    if not model.n_experts:
        writer.add_expert_feed_forward_length(model.ffn_dim)
        writer.add_expert_shared_count(0)
        writer.add_leading_dense_block_count(model.n_layers)
        return
    add_expert_metadata(writer, model)


def add_expert_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    """Writes how experts are chosen and weighted."""
    gates, family = ExpertGatingFuncType, model.family
    writer.add_leading_dense_block_count(model.n_dense_layers * family.begins_dense)
    if not family.has_softmax_gate:
        writer.add_expert_gating_func(gates.SOFTMAX if model.has_softmax_gate else gates.SIGMOID)
    writer.add_expert_shared_count(model.n_shared_experts)
    writer.add_expert_weights_scale(EXPERT_SCALE)
    writer.add_expert_weights_norm(family.normalises_experts and not model.has_softmax_gate)
    if model.n_expert_groups > 1:
        writer.add_expert_group_count(model.n_expert_groups)
        writer.add_expert_group_used_count(model.n_expert_groups_used)


def add_latent_tensors(
    normal: Callable[..., None], layer: int, model: TinyModel, variance: float
) -> list[Matrix]:
    """Adds norms, and what is no matrix of two dimensions; returns the matrices of attention.

    Queries and keys get the ``variance``.
    """
    prefix = f"blk.{layer}."
    width, q_rank = model.model_dim, model.q_rank
    rank, nope_dim, value_dim = model.kv_rank, model.nope_dim, model.value_dim
    n_heads, *_ = model.layers[layer]
    if model.family.has_sliding_latent:
        normal(f"{prefix}attn_k_norm.weight", model.rope_dim, std=0.1, mean=1.0)
        if model.pattern[layer]:
            rank, nope_dim = model.sliding_kv_rank, model.sliding_nope_dim
            value_dim = model.sliding_value_dim
    head_dim, out_dim = nope_dim + model.rope_dim, n_heads * value_dim

    def std(n: int) -> float:
        return float((variance / n) ** 0.5)

    normal(f"{prefix}attn_kv_a_norm.weight", rank, std=0.1, mean=1.0)
    matrices = [
        ("attn_kv_a_mqa", rank + model.rope_dim, width, std(width)),
        ("attn_output", width, out_dim, out_dim**-0.5),
    ]
    if model.family.output_gate is not None:
        matrices.append(("attn_gate", n_heads, width, width**-0.5))
    if q_rank:
        normal(f"{prefix}attn_q_a_norm.weight", q_rank, std=0.1, mean=1.0)
        matrices.append(("attn_q_a", q_rank, width, width**-0.5))
        matrices.append(("attn_q_b", n_heads * head_dim, q_rank, std(q_rank)))
    else:
        matrices.append(("attn_q", n_heads * head_dim, width, std(width)))
    if model.family.has_experts and model.has_matrices_per_head:
        normal(f"{prefix}attn_k_b.weight", n_heads, rank, nope_dim, std=std(rank))
        normal(f"{prefix}attn_v_b.weight", n_heads, value_dim, rank, std=rank**-0.5)
    else:
        rows = n_heads * (nope_dim + value_dim)
        matrices.append(("attn_kv_b", rows, rank, std(rank)))
    if model.has_indexer(layer):
        key_dim = model.index_key_dim
        normal(f"{prefix}indexer.k_norm.weight", key_dim, std=0.1, mean=1.0)
        normal(f"{prefix}indexer.k_norm.bias", key_dim, std=0.2)
        rows = model.index_heads * key_dim
        matrices.append(("indexer.attn_q_b", rows, q_rank, q_rank**-0.5))
        matrices.append(("indexer.attn_k", key_dim, width, width**-0.5))
        # Of both signs: a head may count against a token.
        matrices.append(("indexer.proj", model.index_heads, width, width**-0.5))
    return matrices
