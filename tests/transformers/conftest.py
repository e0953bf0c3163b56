"""A folder whose tokenizer serves every other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import TinyModelFactory

from .folders import write_folder


@pytest.fixture
def tokenizer_folder(tiny_model: TinyModelFactory, tmp_path: Path) -> Path:
    return write_folder(tiny_model(), tmp_path / "tokenizer")
