"""Tiny models whose log-probabilities by llama.cpp are recorded in tests/golden."""

from __future__ import annotations

from collections.abc import Mapping

CONTEXT = 128
# Every so many of the positions that llama.cpp scores (the second half of the context) is kept.
POSITION_STEP = 7
SHAPE: Mapping[str, object] = {
    "tensor_type": "F32",
    "n_layers": 3,
    "model_dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 96,
}
# Windows are narrower and wider than the chunks that the test reads, and narrower than the prompt.
CASES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "llama_biases_untied": {"biases": True, "tied": False},
    "llama_linear": {"rope_scaling": "linear"},
    "llama_llama3": {"rope_scaling": "llama3", "context_length": 512},
    "llama_yarn": {"rope_scaling": "yarn", "original_context": 64},
    "qwen2": {"architecture": "qwen2"},
    "qwen2_yarn": {"architecture": "qwen2", "rope_scaling": "yarn", "original_context": 512},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "qwen3moe": {"architecture": "qwen3moe"},
    # llama.cpp does not read the epsilon of this architecture's norms.
    "qwen2vl": {"architecture": "qwen2vl", "norm_eps": 1e-12},
    "qwen2moe": {"architecture": "qwen2moe", "tied": False, "shared_ffn_dim": 80},
    "qwen3vl": {"architecture": "qwen3vl", "head_dim": 32},
    "qwen3vlmoe": {"architecture": "qwen3vlmoe"},
    "olmoe": {"architecture": "olmoe", "n_kv_heads": 4, "tied": False},
    "granitemoe": {"architecture": "granitemoe"},
    "granitemoe_shared": {"architecture": "granitemoe", "shared_ffn_dim": 80},
    "deepseek2": {
        "architecture": "deepseek2",
        "n_layers": 4,
        "n_experts": 8,
        "n_experts_used": 3,
        "n_expert_groups": 4,
        "n_expert_groups_used": 2,
        "rope_scaling": "yarn",
        "original_context": 64,
        "tied": False,
    },
    # llama.cpp knows models whose queries are made of the layer's input by their number of layers.
    "deepseek2_lite": {
        "architecture": "deepseek2",
        "n_layers": 26,
        "model_dim": 32,
        "ffn_dim": 32,
        "n_heads": 2,
        "n_experts": 4,
        "n_shared_experts": 2,
        "q_rank": 0,
        "kv_rank": 24,
        "rope_dim": 8,
        "has_matrices_per_head": False,
        "has_softmax_gate": True,
    },
    "deepseek2_dense": {"architecture": "deepseek2", "n_experts": 0},
    "ernie4_5": {"architecture": "ernie4_5"},
    "exaone": {"architecture": "exaone", "rope_scaling": "llama3", "context_length": 512},
    "exaone4": {"architecture": "exaone4"},
    # llama.cpp knows the model with windows by its number of layers.
    "exaone4_windows": {
        "architecture": "exaone4",
        "n_layers": 64,
        "model_dim": 32,
        "ffn_dim": 32,
        "n_heads": 2,
        "n_kv_heads": 1,
        "sliding_window": 24,
    },
    "gemma": {"architecture": "gemma", "n_layers": 8},
    "glm4": {"architecture": "glm4", "rotary_dim": 8},
    "gpt-oss": {
        "architecture": "gpt-oss",
        "n_layers": 4,
        "sliding_window": 24,
        "rope_scaling": "yarn",
        "original_context": 64,
        "tied": False,
    },
    "hunyuan": {"architecture": "hunyuan-dense"},
    "internlm2": {"architecture": "internlm2", "tied": False},
    # A state of some rows carries over from call to call.
    "lfm2": {"architecture": "lfm2", "n_layers": 4},
    "lfm2_windows": {
        "architecture": "lfm2",
        "n_layers": 5,
        "n_kv_heads": (0, 2, 0, 0, 2),
        "n_conv_taps": 4,
        "sliding_window": 24,
        "tied": False,
    },
    "lfm2moe": {"architecture": "lfm2moe", "n_layers": 4},
    "qwen35": {"architecture": "qwen35", "n_layers": 4, "rotary_dim": 8, "n_conv_taps": 4},
    "qwen35moe": {"architecture": "qwen35moe", "n_layers": 4, "shared_ffn_dim": 80},
    "qwen3next": {
        "architecture": "qwen3next",
        "n_layers": 4,
        "n_conv_taps": 4,
        "n_delta_value_heads": 6,
        "tied": False,
    },
    "minicpm": {"architecture": "minicpm"},
    "minicpm_long": {
        "architecture": "minicpm",
        "rope_scaling": "longrope",
        "original_context": 64,
    },
    # Its logits are multiplied by 256 / model_dim.
    "minicpm3": {"architecture": "minicpm3", "model_dim": 256, "tied": False},
    "minicpm3_long": {
        "architecture": "minicpm3",
        "model_dim": 256,
        "tied": False,
        "rope_scaling": "longrope",
        "original_context": 64,
    },
    "mistral3": {"architecture": "mistral3", "original_context": 32},
    "mistral3_yarn": {"architecture": "mistral3", "rope_scaling": "yarn", "original_context": 32},
    "seed_oss": {"architecture": "seed_oss"},
    "smollm3": {"architecture": "smollm3", "n_layers": 5},
    "phi3": {"architecture": "phi3"},
    "phi3_short": {"architecture": "phi3", "rope_scaling": "longrope", "original_context": 512},
    "phi3_long": {"architecture": "phi3", "rope_scaling": "longrope", "original_context": 64},
    "phi3_partial": {"architecture": "phi3", "rotary_dim": 12},
    "granite": {"architecture": "granite"},
    "olmo2": {"architecture": "olmo2", "n_kv_heads": 4, "tied": False},
    "olmo2_windows": {
        "architecture": "olmo2",
        "n_layers": 4,
        "tied": False,
        "sliding_window": 24,
        "rope_scaling": "yarn",
        "original_context": 64,
    },
    "gemma2": {"architecture": "gemma2", "head_dim": 32, "sliding_window": 24},
    "gemma2_wide": {"architecture": "gemma2", "sliding_window": 80},
    "gemma3": {
        "architecture": "gemma3",
        "n_layers": 6,
        "sliding_window": 24,
        "rope_base": 1e6,
        "rope_scaling": "linear",
    },
    "gemma3_wide": {
        "architecture": "gemma3",
        "sliding_window": 80,
        "sliding_window_pattern": 2,
        "rope_base": 1e6,
        "rope_base_sliding": 500.0,
    },
    "gemma3_full": {"architecture": "gemma3"},
    "gemma4": {
        "architecture": "gemma4",
        "n_layers": 6,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "head_dim": 32,
        "head_dim_sliding": 16,
        "ffn_dim": (96, 96, 96, 128, 128, 128),
        "n_shared_kv": 3,
        "token_input_dim": 8,
        "rope_base": 1e6,
        "rope_base_sliding": 1e4,
    },
    "gemma4_plain": {
        "architecture": "gemma4",
        "n_layers": 4,
        "n_kv_heads": (2, 2, 1, 2),
        "sliding_window": 80,
        "sliding_window_pattern": 3,
    },
}


def options_of(case: str) -> dict[str, object]:
    """Options of ``TinyModel`` of one case."""
    return {**SHAPE, **CASES[case]}
