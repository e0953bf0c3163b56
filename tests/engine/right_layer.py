"""A tiny model with a layer that guesses tokens ahead, and how all its guesses are right."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.tiny_models.drafting import Tensors

N_LAYERS = 2
DRAFTING_OPTIONS: dict[str, Any] = {
    "architecture": "qwen35",
    "tensor_type": "F32",
    "n_layers": N_LAYERS,
    "n_drafting_layers": 1,
}


def say_the_next(tensors: Tensors) -> None:
    """The model goes through its vocabulary token by token, and the layer knows it."""
    for name, values in tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight")) or ".ffn_down" in name:
            values[:] = 0
    tensors["output.weight"][:] = 3 * np.roll(tensors["token_embd.weight"], 1, axis=0)
    join = tensors[f"blk.{N_LAYERS}.nextn.eh_proj.weight"]
    join[:] = np.eye(*join.shape)  # of the token alone: its embedding comes first
    for name in ("enorm", "shared_head_norm"):
        tensors[f"blk.{N_LAYERS}.nextn.{name}.weight"][:] = 1
    tensors["output_norm.weight"][:] = 1
