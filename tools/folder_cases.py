"""The tiny models of update_folder_goldens.py, as configurations of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA_NETS: Mapping[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_SHARED: Mapping[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_GRANITE: Mapping[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 4.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_LATENT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DSA: Mapping[str, Any] = {
    **_DEEPSEEK,
    "q_lora_rank": 20,
    "index_topk": 30,  # by which no choice is a near tie
    "index_head_dim": 16,
    "index_n_heads": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
_MINISTRAL3: Mapping[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        **_YARN,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
_QWEN_VISION: Mapping[str, Any] = {"depth": 2, "num_heads": 2, "intermediate_size": 48}
_QWEN2_VL: Mapping[str, Any] = {
    "text_config": {
        **SHAPE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    },
    "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "out_hidden_size": 64},
}
_QWEN3_VL: Mapping[str, Any] = {
    "text_config": {
        **SHAPE,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        **_QWEN_VISION,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
_NEOX: Mapping[str, Any] = {"hidden_act": "gelu_new", "rotary_pct": 0.25}
_FALCON: Mapping[str, Any] = {"activation": "gelu_new"}
_FALCON_GROUPS: Mapping[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
# Keys of SHAPE that a type does not have, or counts itself.
ABSENT: Mapping[str, tuple[str, ...]] = {
    "nemotron_h": ("num_hidden_layers",),
    "gpt_neox": ("num_key_value_heads",),
    "falcon": ("num_key_value_heads", "intermediate_size"),
    "bloom": ("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    "mpt": ("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
}
# By the model's type in transformers, and what its configuration has beside SHAPE.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama_yarn": (
        "llama",
        {
            **{"attention_bias": True, "mlp_bias": True},
            "rope_parameters": {
                **{**_YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
                **{"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3},
            },
        },
    ),
    "lfm2": ("lfm2", {**_CONVOLUTIONS, "block_multiple_of": 32}),
    "lfm2_moe": ("lfm2_moe", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1}),
    "qwen3_next": ("qwen3_next", {**_DELTA_NETS, **_SHARED}),
    "qwen3_5_text": ("qwen3_5_text", {**_DELTA_NETS, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA_NETS, **_SHARED}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": {**_YARN, "truncate": False},
        },
    ),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere2": ("cohere2", {"sliding_window": 24, "logit_scale": 0.3}),
    "starcoder2": ("starcoder2", {"sliding_window": 24, "use_bias": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi_grouped": ("phi", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "gpt_neox": ("gpt_neox", _NEOX),
    "gpt_neox_sequential": ("gpt_neox", {**_NEOX, "use_parallel_residual": False}),
    "gpt_neox_erf": ("gpt_neox", {**_NEOX, "hidden_act": "gelu"}),
    "falcon": ("falcon", _FALCON),
    "falcon_heads": ("falcon", {**_FALCON, "multi_query": False, "tie_word_embeddings": False}),
    "falcon_two_norms": ("falcon", {**_FALCON, **_FALCON_GROUPS}),
    "falcon_one_norm": (
        "falcon",
        {**_FALCON, **_FALCON_GROUPS, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
    ),
    "falcon_erf": ("falcon", {**_FALCON, "activation": "gelu"}),
    "bloom": ("bloom", {}),
    "bloom_untied": (
        "bloom",
        {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": False},
    ),
    "mpt_erf": ("mpt", {"max_seq_len": 512}),
    "mpt_erf_limited": (
        "mpt",
        {
            **{"max_seq_len": 512, "num_attention_heads": 6, "hidden_size": 96},
            "attn_config": {"clip_qkv": 0.7},
        },
    ),
    "olmo": ("olmo", {"tie_word_embeddings": True}),
    "olmo_limited": ("olmo", {"clip_qkv": 0.7}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **_DSA,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm_moe_dsa": ("glm_moe_dsa", _DSA),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        {**_DSA, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **_DEEPSEEK,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    # The row of a padding token would be set to 0.
    "youtu": ("youtu", {**_LATENT, "q_lora_rank": 20, "pad_token_id": None}),
    "plm": ("plm", {**_LATENT, "q_lora_rank": None, "pad_token_id": None, "hidden_act": "relu2"}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **SHAPE,
                "num_hidden_layers": 7,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 24,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                },
            },
            "vision_config": {**_VISION, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "ministral3": ("ministral3", _MINISTRAL3),
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "ministral3", **SHAPE, **_MINISTRAL3},
            "vision_config": _VISION,
        },
    ),
    "qwen2_vl": ("qwen2_vl", _QWEN2_VL),
    "qwen2_5_vl": ("qwen2_5_vl", _QWEN2_VL),
    "qwen3_vl": ("qwen3_vl", _QWEN3_VL),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "minicpm3": ("minicpm3", {**_LATENT, "q_lora_rank": 20}),
    "gemma4_text": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4_text_values_of_keys": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 0.6],
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
        },
    ),
    "falcon_h1_tied": (
        "falcon_h1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 32,
            "lm_head_multiplier": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": ("granitemoe", _GRANITE),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_GRANITE, **_MAMBA2, "position_embedding_type": "nope"},
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        {**_GRANITE, **_MAMBA2, "position_embedding_type": "rope", "num_local_experts": 0},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 32,
            # Others, and the original, have no least time step.
            "time_step_min": 1e-30,
        },
    ),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, "shared_intermediate_size": 48}),
}
