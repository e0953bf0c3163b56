"""Tiny models with recurrent layers, of every kind."""

from __future__ import annotations

MODELS: dict[str, dict[str, object]] = {
    "lfm2": {"architecture": "lfm2", "n_layers": 4, "n_conv_taps": 4},
    # The last layer is a convolution: of most tokens it needs its input alone.
    "lfm2moe": {"architecture": "lfm2moe", "n_layers": 3},
    "qwen35": {"architecture": "qwen35", "n_layers": 4, "n_conv_taps": 4},
    "qwen3next": {"architecture": "qwen3next", "n_layers": 3},
    # A convolution of n-grams beside that of a delta net, and indexers that score blocks.
    "qwen4exp": {"architecture": "qwen4exp", "n_layers": 4, "n_conv_taps": 4},
    # Beside latent attention.
    "bailingmoe3": {
        **{"architecture": "bailingmoe3", "n_layers": 4, "n_conv_taps": 4},
        **{"q_rank": 64, "kv_rank": 64, "nope_dim": 32},
    },
    "kimi-linear": {
        **{"architecture": "kimi-linear", "n_layers": 4, "n_conv_taps": 4},
        **{"q_rank": 0, "kv_rank": 64, "nope_dim": 32},
    },
    "granitehybrid": {"architecture": "granitehybrid", "n_layers": 4, "n_conv_taps": 4},
    # Keys and values and a recurrent state in one layer.
    "falcon-h1": {"architecture": "falcon-h1", "n_layers": 2},
    "jamba": {"architecture": "jamba", "n_layers": 4, "n_conv_taps": 4},
    "plamo2": {"architecture": "plamo2", "n_layers": 4, "n_conv_taps": 4},
    # No layer attends.
    "mamba": {"architecture": "mamba", "n_layers": 3},
    "mamba2": {"architecture": "mamba2", "n_layers": 3},
    "rwkv6": {"architecture": "rwkv6", "n_layers": 3},
    "rwkv6qwen2": {"architecture": "rwkv6qwen2", "n_layers": 3},
    "arwkv7": {"architecture": "arwkv7", "n_layers": 3, "wkv_gate_rank": 0},
    # Nor here, and networks keep something too.
    "rwkv7": {"architecture": "rwkv7", "n_layers": 3},
    # Two of four layers keep nothing of the tokens, or a state alone.
    "nemotron_h": {"architecture": "nemotron_h", "n_layers": 4},
}
