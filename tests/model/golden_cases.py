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
}


def options_of(case: str) -> dict[str, object]:
    """Options of ``TinyModel`` of one case."""
    return {**SHAPE, **CASES[case]}
