"""Pytest plugin: tiny seeded GGUF models, written once per session.

Activated by `pytest_plugins = ["tests.tiny_models"]` in tests/conftest.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from tools.make_tiny_model import write_tiny_model

TinyModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TinyModelFactory:
    """`tiny_model(tensor_type="Q4_0", ...)` -> path of a file with the options of TinyModel."""
    directory = tmp_path_factory.mktemp("tiny_models")
    # Of all workers; a pytest that a test starts is none, but has their environment.
    is_worker = hasattr(request.config, "workerinput")
    common = tmp_path_factory.getbasetemp().parent / "tiny_models" if is_worker else None
    paths: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in paths:
            paths[key] = _write(directory / f"tiny-{len(paths)}.gguf", options, common)
        return paths[key]

    return make


def _write(path: Path, options: Mapping[str, object], common: Path | None) -> Path:
    """The file in ``path``: a copy of what the first worker to need it has put into ``common``.

    Writing one takes ten times as long. A copy, as tests write into the file and its folder.
    """
    if common is None:
        return write_tiny_model(path, **options)
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    written = common / f"{digest}.gguf"
    if not written.exists():
        common.mkdir(exist_ok=True)
        part = written.with_suffix(f".{os.getpid()}")  # another may be writing it too
        write_tiny_model(part, **options).replace(written)
    shutil.copyfile(written, path)
    return path


def with_vectors(source: Path, path: Path, vectors: Mapping[str, np.ndarray]) -> Path:
    """A copy of a model file, in ``path``, in which vectors have other numbers."""
    path.write_bytes(source.read_bytes())
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name in vectors:
            tensor.data[:] = vectors[tensor.name]
    return path
