"""A model file of its own for a test, and its packed weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runners.kept_weights import load
from tests.tiny_models import TinyModelFactory


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(tensor_type="Q4_0"), tmp_path / "model.gguf"))


@pytest.fixture
def kept(path: Path, tmp_path: Path) -> Path:
    """A folder with the packed weights of ``path``."""
    folder = tmp_path / "kept"
    load(path, folder)
    return folder
