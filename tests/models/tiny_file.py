"""Tiny files of every architecture, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGUFWriter

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


@contextmanager
def changed_key(monkeypatch: pytest.MonkeyPatch, key: str, value: object) -> Iterator[None]:
    """Files that are written meanwhile have another ``value`` of a key; None: they lack the key."""

    def changed(write: Callable[..., None]) -> Callable[..., None]:
        def add(writer: GGUFWriter, name: str, given: object, **options: object) -> None:
            if name != key:
                write(writer, name, given, **options)
            elif value is not None:
                write(writer, name, value, **options)

        return add

    with monkeypatch.context() as patch:
        for kind in ("uint32", "float32", "bool", "array"):
            name = f"add_{kind}"
            patch.setattr(GGUFWriter, name, changed(getattr(GGUFWriter, name)))
        yield
