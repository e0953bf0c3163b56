"""A tiny model as an LLM, with chunks that a short text fills."""

from __future__ import annotations

from pathlib import Path

from edgeh2o import LLM, H2OConfig, PrefillConfig
from edgeh2o.attention.base import SparseAttentionConfig

# 2 chunks of 16 per batch, 3 batches per window.
PREFILL = PrefillConfig(batch_size=32, chunk_size=16)
WINDOW = 96
TEXT = "the thing is that the art is there and the hen is in the pen " * 20


def load(path: Path, attention: SparseAttentionConfig | None = None) -> LLM:
    # In f32, because bf16 rounds otherwise when chunks are cut otherwise.
    attention = attention or H2OConfig(local=4, heavy=4)
    return LLM(path, prefill=PREFILL, attention=attention, attention_precision="f32")
