"""Pytest plugin: tiny seeded GGUF models, written once per session.

Activated by `pytest_plugins = ["tests.tiny_models"]` in tests/conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from tools.make_tiny_model import write_tiny_model

TinyModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    """`tiny_model(tensor_type="Q4_0", ...)` -> path of a file with the options of TinyModel."""
    directory = tmp_path_factory.mktemp("tiny_models")
    paths: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in paths:
            paths[key] = write_tiny_model(directory / f"tiny-{len(paths)}.gguf", **options)
        return paths[key]

    return make


def with_vectors(source: Path, path: Path, vectors: Mapping[str, np.ndarray]) -> Path:
    """A copy of a model file, in ``path``, in which vectors have other numbers."""
    path.write_bytes(source.read_bytes())
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name in vectors:
            tensor.data[:] = vectors[tensor.name]
    return path
