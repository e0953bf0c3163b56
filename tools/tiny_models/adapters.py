"""Low-rank adapters in a model's own file, which tokens choose (graniteswitch)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tools.tiny_models.model import TinyModel


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    prefix = f"{model.architecture}.adapters"
    writer.add_uint32(f"{prefix}.count", len(model.adapter_tokens))
    writer.add_uint32(f"{prefix}.lora_rank", model.adapter_rank)
    if model.adapter_gain is not None:
        writer.add_float32(f"{prefix}.router_gain", model.adapter_gain)
    for i, name in enumerate(("activate", "substitute")):
        ids = [pair[i] for pair in model.adapter_tokens]
        writer.add_array(f"{prefix}.token_ids_{name}", ids)


def add_layer(
    tensors: dict[str, NDArray[np.float32]],
    normal: Callable[..., None],
    model: TinyModel,
    layer: int,
) -> None:
    """A and B of every matrix: zeros, then those of every adapter."""
    n_slots, rank = len(model.adapter_tokens) + 1, model.adapter_rank
    names = [
        *("attn_q", "attn_k", "attn_v", "attn_output"),
        *("ffn_gate", "ffn_up", "ffn_down"),
    ]
    for name in (f"blk.{layer}.{each}" for each in names):
        rows, cols = tensors[f"{name}.weight"].shape
        normal(f"{name}.lora_a", n_slots, rank, cols, std=cols**-0.5)
        normal(f"{name}.lora_b", n_slots, rows, rank, std=0.4 * rank**-0.5)
        for half in "ab":
            tensors[f"{name}.lora_{half}"][0] = 0.0
