"""Tiny models that go through their vocabulary, and drafters in files of their own that know it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.drafter_cases import GEMMA4, LLAMA
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.drafters import Tensors, write_assistant, write_dflash, write_eagle3
from tools.tiny_models.model import TinyModel
from tools.tiny_models.tensors import random_tensors

ROPE_BASE = 1e6  # so that a key looks alike a few positions on
CONTEXT = 8192


def silence(tensors: Tensors) -> None:
    """Neither attention nor networks add anything."""
    for name, values in tensors.items():
        if name.endswith("attn_output.weight") or ".ffn_down" in name:
            values[:] = 0


def say_the_next(tensors: Tensors) -> None:
    """The model goes through its vocabulary token by token."""
    silence(tensors)
    tensors["output.weight"][:] = 3 * np.roll(tensors["token_embd.weight"], 1, axis=0)
    tensors["output_norm.weight"][:] = 1


def write_right_assistant(folder: Path) -> tuple[Path, Path]:
    """A model, and an assistant that looks at the token alone."""
    options: dict[str, Any] = {**GEMMA4, "n_layers": 3, "context_length": CONTEXT}
    model = TinyModel(**options)
    embedding = random_tensors(model)["token_embd.weight"]

    def know(tensors: Tensors) -> None:
        silence(tensors)
        join = tensors["nextn.pre_projection.weight"]
        join[:] = np.eye(*join.shape)
        tensors["output_norm.weight"][:] = 1
        tensors["token_embd.weight"][:] = 3 * np.roll(embedding, 1, axis=0)

    path = write_tiny_model(folder / "model.gguf", edit=say_the_next, **options)
    width = model.model_dim
    return path, write_assistant(folder / "right.gguf", model, model_dim=width, edit=know)


def write_right_eagle3(folder: Path) -> tuple[Path, Path]:
    """A model, and what attends to keys that are as its latest token: its embedding comes out."""
    options: dict[str, Any] = {**LLAMA, "rope_base": ROPE_BASE, "context_length": CONTEXT}
    model = TinyModel(**options)

    def know(tensors: Tensors) -> None:
        silence(tensors)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.0.{name}.weight"][:] = 1
        tensors["blk.0.attn_norm_2.weight"][:] = 0.01
        for letter, size in (("q", 6), ("k", 6), ("v", 1)):
            matrix = tensors[f"blk.0.attn_{letter}.weight"]
            matrix[:] = size * np.eye(*matrix.shape)
        output = tensors["blk.0.attn_output.weight"]
        output[:] = np.eye(*output.shape)
        tensors["output_norm.weight"][:] = 1

    n_heads = model.model_dim // model.head_dim
    return write_tiny_model(folder / "model.gguf", edit=say_the_next, **options), write_eagle3(
        folder / "right.gguf",
        model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        has_output=False,
        norms_residual=True,
        edit=know,
    )


def write_right_dflash(folder: Path) -> tuple[Path, Path]:
    """A model, and what guesses one token: a row of zeros attends to all alike, as do its values.

    But for those of the latest token: its embedding comes out.
    """
    options: dict[str, Any] = {**LLAMA, "context_length": CONTEXT}
    model, mask = TinyModel(**options), 150  # which texts of the tests do not come to
    embedding = random_tensors(model)["token_embd.weight"]

    def know(tensors: Tensors) -> None:
        silence(tensors)
        tensors["token_embd.weight"][:] = embedding
        tensors["token_embd.weight"][mask] = 0
        for name in ("fc", "blk.0.attn_q"):
            tensors[f"{name}.weight"][:] = 0
        tensors["blk.0.attn_norm.weight"][:] = 1
        for name in ("v", "output"):
            matrix = tensors[f"blk.0.attn_{name}.weight"]
            matrix[:] = np.eye(*matrix.shape)
        tensors["output_norm.weight"][:] = 1
        tensors["output.weight"][:] = 3 * np.roll(embedding, 1, axis=0)

    return write_tiny_model(folder / "model.gguf", edit=say_the_next, **options), write_dflash(
        folder / "right.gguf",
        model,
        n_layers=1,
        n_kv_heads=model.model_dim // model.head_dim,
        has_embedding=True,
        block_size=2,
        mask_token=mask,
        edit=know,
    )


WRITERS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "assistant": write_right_assistant,
    "eagle3": write_right_eagle3,
    "dflash": write_right_dflash,
}
