"""Tiny reranking models whose ranks of documents by llama.cpp are recorded in tests/golden."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.model.golden_cases import SHAPE

FILE = Path(__file__).parent / "golden" / "ranks.json"
QUERY = "Where do the foxes sleep in winter, and why?"
DOCUMENTS = (
    "In a den that they dig, or that a badger has left.",
    "The market opens at nine; bring your own bags.",
    "caf\u00e9 \u4f60\u597d, 3.5 % of {query} \u2014  two  blanks, a line's end and more of it" * 3,
    "x",
)
_RANK: Mapping[str, object] = {**SHAPE, "pooling_type": 4, "rank_labels": ("yes", "no")}
CASES: Mapping[str, Mapping[str, object]] = {
    "qwen3": {**_RANK, "architecture": "qwen3"},
    "qwen3_untied": {**_RANK, "architecture": "qwen3", "tied": False, "seed": 3},
    "qwen3vl": {**_RANK, "architecture": "qwen3vl", "rank_labels": ("good", "bad", "neither")},
    # Of RoBERTa's kind, and of BERT's, whose labels have names.
    "bert_unigram": {
        **{**_RANK, "architecture": "bert", "n_kv_heads": 4, "context_length": 256},
        **{"has_unigram": True, "rank_labels": ("LABEL_0",)},
        "rank_tensors": ("cls.weight", "cls.bias", "cls.output.bias"),
    },
    "bert": {
        **{**_RANK, "architecture": "bert", "n_kv_heads": 4, "context_length": 256},
        **{"rank_labels": ("good", "bad", "neither"), "rank_tensors": ("cls.output.bias",)},
    },
    "neo-bert": {
        **{**_RANK, "architecture": "neo-bert", "adds_eos": True, "rank_labels": ("a", "b")},
        "rank_tensors": ("cls.weight", "cls.bias", "cls.output.bias"),
    },
    "modern-bert": {
        **{**_RANK, "architecture": "modern-bert", "n_kv_heads": 4, "sliding_window": 12},
        **{"sliding_window_pattern": 3, "adds_eos": True, "rank_labels": ("LABEL_0",)},
        "rank_tensors": ("cls.weight", "cls.norm.weight", "cls.output.bias"),
    },
}
