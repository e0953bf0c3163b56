"""Tiny files of every architecture, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import TensorBinding, read_model
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.tensors import Tensors

SHAPE = {"n_layers": 6, "model_dim": 32, "n_heads": 4, "head_dim": 8, "ffn_dim": 16}


def write_tiny(
    folder: Path,
    architecture: str,
    *,
    edit: Callable[[Tensors], None] | None = None,
    **options: object,
) -> Path:
    """Writes folder/tiny.gguf anew, for tests that change what the writer writes."""
    options = {**SHAPE, **options}
    return write_tiny_model(folder / "tiny.gguf", edit=edit, architecture=architecture, **options)


def read(path: Path, **options: object) -> tuple[DecoderConfig, list[TensorBinding]]:
    with open_gguf(path) as file:
        return read_model(file, **options)


def read_tiny(tiny_model: TinyModelFactory, architecture: str, **options: object) -> DecoderConfig:
    return read(tiny_model(architecture=architecture, **{**SHAPE, **options}))[0]
