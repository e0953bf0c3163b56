"""What files of tiny models say of themselves, but for their tokenizer."""

from __future__ import annotations

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from tools.tiny_models import adapters, drafting, gemma3n, gemma4, mixed_streams, recurrent
from tools.tiny_models.latent import add_expert_metadata, add_latent_metadata
from tools.tiny_models.model import TinyModel
from tools.tiny_models.rope import LINEAR_FACTOR, LONGROPE_ATTENTION_FACTOR, rope_sections

TEMPERATURE_LENGTH = 40

# As files of Qwen3-Reranker have it, shorter.
RANK_TEMPLATE = (
    "<|im_start|>system\nJudge the Document.<|im_end|>\n<|im_start|>user\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n\n"
)


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    writer.add_name("tiny")
    if model.family.has_two_stacks:
        n_passes = model.n_high_cycles * (model.n_low_cycles + 1)
        writer.add_block_count(model.n_layers * n_passes)
        for name, count in (
            ("layers_per_stack", model.n_layers),
            ("h_cycles", model.n_high_cycles),
            ("l_cycles", model.n_low_cycles),
        ):
            writer.add_uint32(f"{model.architecture}.hrm.{name}", count)
    else:
        writer.add_block_count(model.n_layers + model.n_drafting_layers)
    drafting.add_metadata(writer, model)
    writer.add_context_length(model.context_length)
    if model.pooling_type is not None:
        writer.add_uint32(f"{model.architecture}.pooling_type", model.pooling_type)
    if model.rank_labels:
        key = f"{model.architecture}.classifier.output_labels"
        writer.add_array(key, list(model.rank_labels))
    if model.rank_labels and model.is_causal:  # others read a pair of texts
        writer.add_string("tokenizer.chat_template.rerank", RANK_TEMPLATE)
    if model.hidden_activation is not None:
        writer.add_string(f"{model.architecture}.hidden_activation", model.hidden_activation)
    if model.family.has_sum_norms:
        writer.add_token_type_count(2)
    if not model.is_causal:
        writer.add_causal_attention(False)
    if model.dense_dim:
        writer.add_dense_features_dims("dense_2", model.model_dim, model.dense_dim)
        writer.add_dense_features_dims("dense_3", model.dense_dim, model.model_dim)
    if model.adds_eos:
        writer.add_add_eos_token(True)
    writer.add_embedding_length(model.model_dim)
    if model.family.has_only_mamba:
        writer.add_feed_forward_length(0)
    elif model.family.mamba2 == "single":
        writer.add_feed_forward_length([ffn_dim for _, _, ffn_dim in model.layers])
    else:
        n_widths = 2 if model.family.has_joint_width else 1
        widths = model.ffn_dim
        writer.add_feed_forward_length(
            n_widths * widths if isinstance(widths, int) else [n_widths * n for n in widths]
        )
    if model.family.has_experts and model.n_experts:
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.n_experts_used)
        if model.family.has_sum_norms:
            writer.add_moe_every_n_layers(2)
        if model.family.has_expert_width:
            writer.add_expert_feed_forward_length(model.ffn_dim)
        if model.family.has_adjugates:
            writer.add_expert_chunk_feed_forward_length(model.adjugate_ffn_dim)
            writer.add_experts_per_group(model.n_adjugate_sharers)
            writer.add_expert_group_scale(model.adjugate_scale)
        shared_ffn_dim = model.shared_ffn_dim
        if shared_ffn_dim is None and model.family.has_shared_width:
            shared_ffn_dim = max(ffn_dim for _, _, ffn_dim in model.layers)
        if shared_ffn_dim is not None:
            writer.add_expert_shared_feed_forward_length(shared_ffn_dim)
    if model.family.has_sections:
        writer.add_rope_dimension_sections(rope_sections(model.n_pairs))
    if model.family.has_file_gate:
        gates = ExpertGatingFuncType
        writer.add_expert_gating_func(gates.SOFTMAX if model.has_softmax_gate else gates.SIGMOID)
    if model.family.has_gate_limits:
        limits = np.linspace(0.0, 1.0, model.n_layers)
        writer.add_array(f"{model.architecture}.swiglu_clamp_exp", limits.tolist())
        if model.family.has_shared_limits:
            key = f"{model.architecture}.swiglu_clamp_shexp"
            writer.add_array(key, (0.5 * limits[::-1]).tolist())
    if not model.family.attends:
        writer.add_head_count(0)
    elif model.family.lacks_mixers or model.family.has_selecting_mamba2:
        writer.add_head_count([n_heads for n_heads, *_ in model.layers])
    else:
        writer.add_head_count(model.n_heads)
    if model.family.is_latent:
        add_latent_metadata(writer, model)
    elif model.family.has_expert_scales:
        add_expert_metadata(writer, model)
    elif model.family.has_softmax_gate:
        writer.add_leading_dense_block_count(model.n_dense_layers)
        writer.add_interleave_moe_layer_step(1)
    elif model.family.has_expert_bias and model.family.mamba2 is None:
        if model.family.begins_dense and not model.family.hides_dense:
            writer.add_leading_dense_block_count(model.n_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    family = model.family
    has_some = family.has_short_conv or family.has_mamba1 or family.lacks_mixers
    has_some &= family.attends
    if has_some or model.family.mamba2 in ("other", "single"):
        writer.add_head_count_kv([n_kv_heads for _, n_kv_heads, _ in model.layers])
    elif not model.family.is_latent and model.family.attends:
        writer.add_head_count_kv(model.n_kv_heads)
    recurrent.add_metadata(writer, model)
    if model.family.mixes_streams:
        mixed_streams.add_metadata(writer, model)
    if model.family.chooses_adapters:
        adapters.add_metadata(writer, model)
    if model.family.chooses_by_head:
        _, n_kv_heads, _ = model.layers[0]
        writer.add_indexer_head_count(n_kv_heads)
        writer.add_indexer_key_length(model.index_key_dim)
        writer.add_indexer_top_k(model.index_top_k // model.index_block_tokens)
        for key, value in (
            ("block_size", model.index_block_tokens),
            ("local_blocks", model.index_local_blocks),
        ):
            writer.add_uint32(f"{model.architecture}.attention.indexer.{key}", value)
    if model.family.mamba2 == "other" and not model.family.has_selecting_mamba2:
        writer.add_rope_scaling_finetuned(model.rotates)
    if not model.family.is_latent:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_value_dim)
    writer.add_rope_dimension_count(2 * model.n_pairs)
    if model.rotary_dim_sliding is not None:
        key = f"{model.architecture}.rope.dimension_count_swa"
        writer.add_uint32(key, model.rotary_dim_sliding)
    writer.add_rope_freq_base(model.rope_base)
    if model.family.has_layer_norm:
        writer.add_layer_norm_eps(model.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(model.norm_eps)
    if model.family.has_xielu:
        numbers = np.linspace(0.3, 0.9, model.n_layers)
        writer.add_xielu_alpha_p(numbers.tolist())
        writer.add_xielu_alpha_n((numbers[::-1] - 0.5).tolist())
        writer.add_xielu_beta((0.5 * numbers).tolist())
        writer.add_xielu_eps([-1e-6] * model.n_layers)
    length = model.temperature_length
    if model.family.has_temperature_length:
        length = length or TEMPERATURE_LENGTH
    if length is not None:
        writer.add_uint32(f"{model.architecture}.attention.temperature_length", length)
    if model.architecture == "llama4":
        writer.add_interleave_moe_layer_step(model.experts_step)
    if model.family.has_loops:
        writer.add_uint32(f"{model.architecture}.num_loops", model.n_loops)
        writer.add_bool(f"{model.architecture}.skip_loop_final_norm", model.skips_loop_norm)
    if model.architecture == "gptneox":
        writer.add_parallel_residual(not model.is_sequential)
    writer.add_vocab_size(model.vocab_size)
    if model.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(model.rope_scaling))
        writer.add_rope_scaling_factor(LINEAR_FACTOR)
    if model.rope_scaling == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(LONGROPE_ATTENTION_FACTOR)
    if model.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(model.original_context)
    window = model.sliding_window
    family = model.family
    has_pattern = family.is_gemma4 or family.is_gemma3n or family.has_window_pattern
    if window is None and (has_pattern or family.needs_window):
        window = 24  # the key must be there
    if window is not None:
        writer.add_sliding_window(window)
    if model.family.is_gemma4:
        gemma4.add_metadata(writer, model)
    elif model.family.is_gemma3n:
        gemma3n.add_metadata(writer, model)
    elif model.family.has_window_pattern:
        writer.add_sliding_window_pattern(model.pattern)
    elif model.sliding_window_pattern is not None:
        writer.add_sliding_window_pattern(model.sliding_window_pattern)
    if model.rope_pattern is not None:
        key = f"{model.architecture}.attention.rope_pattern"
        writer.add_array(key, list(model.rope_pattern))
    if model.rope_base_sliding is not None:
        writer.add_rope_freq_base_swa(model.rope_base_sliding)
    for key, value in model.family.keys.items():
        writer.add_float32(f"{model.architecture}.{key}", value)
