"""Tiny models whose vectors of a text by llama.cpp are recorded in tests/golden/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.model.golden_cases import SHAPE

FOLDER = Path(__file__).parent / "golden" / "embeddings"
TEXT = "The quick brown fox jumps over the lazy dog, and back again; then it all begins anew."
# What llama.cpp is asked for; "default" is what the model's file says.
POOLINGS = ("none", "mean", "cls", "last", "default")
_CASES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "qwen3_last": {"architecture": "qwen3", "pooling_type": 3, "adds_eos": True},
    "gemma3_mean": {"architecture": "gemma3", "sliding_window": 24, "pooling_type": 1},
    "gpt2": {"architecture": "gpt2"},
    "mamba2_cls": {"architecture": "mamba2", "pooling_type": 2},
}
CASES = tuple(_CASES)


def options_of(case: str) -> dict[str, object]:
    """Options of ``TinyModel`` of one case."""
    return {**SHAPE, **_CASES[case]}
