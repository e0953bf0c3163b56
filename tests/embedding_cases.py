"""Tiny models whose vectors of a text by llama.cpp are recorded in tests/golden/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.model.golden_cases import SHAPE
from tests.tiny_architectures import ENCODERS

FOLDER = Path(__file__).parent / "golden" / "embeddings"
TEXT = "The quick brown fox jumps over the lazy dog, and back again; then it all begins anew."
# What llama.cpp is asked for; "default" is what the model's file says.
POOLINGS = ("none", "mean", "cls", "last", "default")
_CASES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "qwen3_last": {"architecture": "qwen3", "pooling_type": 3, "adds_eos": True},
    "gemma3_mean": {"architecture": "gemma3", "sliding_window": 24, "pooling_type": 1},
    "gpt2": {"architecture": "gpt2"},
    "gemma-embedding": {
        **{"architecture": "gemma-embedding", "n_layers": 4, "sliding_window": 10},
        **{"sliding_window_pattern": 2, "rope_base": 1e6, "pooling_type": 1, "dense_dim": 96},
    },
    "gemma-embedding_plain": {
        **{"architecture": "gemma-embedding", "n_layers": 7, "sliding_window": 7},
        **{"rope_base": 1e6, "pooling_type": 1},
    },
    "llama-embed": {"architecture": "llama-embed", "pooling_type": 1},
    "bert": {"architecture": "bert", "n_kv_heads": 4, "pooling_type": 2, "context_length": 512},
    "bert_unigram": {
        **{"architecture": "bert", "n_kv_heads": 4, "pooling_type": 1, "context_length": 512},
        **{"has_unigram": True, "seed": 5},
    },
    "nomic-bert": {"architecture": "nomic-bert", "n_kv_heads": 4, "pooling_type": 1},
    "jina-bert-v2": {
        **{"architecture": "jina-bert-v2", "model_dim": 96, "n_heads": 6, "n_kv_heads": 6},
        **{"network": "joined", "has_qk_norm": False, "pooling_type": 1},
    },
    "jina-bert-v2_norms": {
        **{"architecture": "jina-bert-v2", "n_kv_heads": 4, "has_two_norms": True},
        "pooling_type": 1,
    },
    "jina-bert-v2_plain": {
        **{"architecture": "jina-bert-v2", "n_kv_heads": 4, "has_qk_norm": False},
        **{"network": "plain", "is_fused": True, "pooling_type": 1},
    },
    "jina-bert-v3": {
        **{"architecture": "jina-bert-v3", "n_kv_heads": 4, "pooling_type": 1},
        **{"has_unigram": True, "rope_base": 2e4},
    },
    "nomic-bert-moe": {
        **{"architecture": "nomic-bert-moe", "n_layers": 4, "n_kv_heads": 4, "pooling_type": 1},
        "has_unigram": True,
    },
    "eurobert": {"architecture": "eurobert", "pooling_type": 3, "rope_base": 25e4},
    "neo-bert": {"architecture": "neo-bert", "pooling_type": 2},
    "modern-bert": {
        **{"architecture": "modern-bert", "n_layers": 5, "n_kv_heads": 4, "sliding_window": 12},
        **{"sliding_window_pattern": 3, "rope_base": 16e4, "pooling_type": 2, "adds_eos": True},
    },
    "modern-bert_silu": {
        **{"architecture": "modern-bert", "n_kv_heads": 4, "hidden_activation": "silu"},
        "pooling_type": 1,
    },
    "mamba2_cls": {"architecture": "mamba2", "pooling_type": 2},
}
CASES = tuple(_CASES)
ENCODER_CASES = tuple(
    case for case, options in _CASES.items() if options.get("architecture") in ENCODERS
)


def options_of(case: str) -> dict[str, object]:
    """Options of ``TinyModel`` of one case."""
    return {**SHAPE, **_CASES[case]}
