"""What tiny models of every architecture are made with on the host device."""

from __future__ import annotations

from edgeh2o.models.spec import find_architecture, registered_architectures

# What tiny models of an architecture, of all that are registered, are made with.
ARCHITECTURES: dict[str, dict[str, object]] = {
    **{name: {} for name in registered_architectures() if find_architecture(name).is_causal},
    "phi3": {"rotary_dim": 12},
    "openelm": {
        **{"n_layers": 3, "n_heads": (4, 2, 4), "n_kv_heads": (2, 1, 4)},
        "ffn_dim": (96, 64, 128),
    },
    "exaone4": {"n_layers": 4, "sliding_window": 20},
    "exaone-moe": {"n_layers": 4, "sliding_window": 20, "shared_ffn_dim": 80},
    "glm4": {"rotary_dim": 8},
    "glm4moe": {"rotary_dim": 8},
    "smollm3": {"n_layers": 4},
    "olmo2": {"tied": False},
    "gemma2": {"sliding_window": 20},
    "gemma3": {
        "n_layers": 3,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "rope_base": 1e6,
    },
    "gemma4": {
        **{"n_layers": 6, "sliding_window": 20, "n_shared_kv": 3, "token_input_dim": 32},
        **{"head_dim": 32, "head_dim_sliding": 16, "ffn_dim": (96, 96, 96, 128, 128, 128)},
    },
    "falcon-h1": {"n_conv_taps": 4, "ssd_state_dim": 48},
    "gpt-oss": {"n_layers": 3, "sliding_window": 20},
    "granite_swa": {
        **{"n_layers": 3, "sliding_window": 20, "shared_ffn_dim": 80},
        "rope_pattern": (True, False, False),
    },
    "granitehybrid": {"n_layers": 3, "shared_ffn_dim": 80},
    "granitemoe": {"shared_ffn_dim": 80},
    "hunyuan-moe": {"shared_ffn_dim": 80},
    "lfm2": {"n_layers": 3, "n_conv_taps": 4},
    "lfm2moe": {"n_layers": 3},
    "mellum": {"n_layers": 4, "sliding_window": 20},
    "mistral3": {"original_context": 15},
    "nemotron_h": {"n_layers": 4, "n_conv_taps": 4},
    "nemotron_h_moe": {"n_layers": 4, "shared_ffn_dim": 80},
    "plm": {"q_rank": 0},
    "qwen2moe": {"shared_ffn_dim": 160},
    "qwen35": {"n_layers": 3, "rotary_dim": 8, "n_conv_taps": 4},
    "qwen35moe": {"shared_ffn_dim": 80},
    "qwen3next": {"n_layers": 3, "shared_ffn_dim": 80},
}
VARIANTS: dict[str, dict[str, object]] = {
    "llama-biases": {"biases": True, "tied": False},
    "chatglm-fused": {"architecture": "chatglm", "rotary_dim": 8, "is_fused": True},
    "llama-yarn": {"rope_scaling": "yarn"},
    "mistral": {"sliding_window": 20},
    "mixtral": {"is_mixture": True},
    "gemma4-plain": {
        **{"architecture": "gemma4", "n_layers": 3, "sliding_window": 20},
        **{"has_values_of_keys": True},
    },
    "gemma4-experts": {
        **{"architecture": "gemma4", "n_layers": 3, "sliding_window": 20},
        "expert_ffn_dim": 32,
    },
    "falcon-h1-plain": {"architecture": "falcon-h1", "n_ssd_groups": 1, "has_ssm_norm": False},
    "granite_swa-dense": {
        **{"architecture": "granite_swa", "n_experts": 0, "n_layers": 3, "sliding_window": 20},
        "biases": True,
    },
    "granitehybrid-dense": {
        **{"architecture": "granitehybrid", "n_experts": 0, "rotates": True, "biases": True},
    },
    "nemotron_h-biases": {"architecture": "nemotron_h", "n_layers": 4, "biases": True},
    "hrm_text": {"architecture": "hrm_text", "n_layers": 1},
    "nanbeige-loops": {"architecture": "nanbeige", "n_layers": 2, "n_loops": 2},
    "17-heads-of-a-kv-head": {"n_heads": 34, "head_dim": 8},
    "unequal": {
        "n_layers": 3,
        "n_heads": (4, 2, 4),
        "n_kv_heads": (2, 1, 4),
        "ffn_dim": (96, 64, 128),
    },
}
MODELS = {name: {"architecture": name, **more} for name, more in ARCHITECTURES.items()} | VARIANTS
