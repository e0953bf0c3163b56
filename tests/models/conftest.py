"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.model_config import DecoderConfig
from tests.models.tiny_file import read, write_tiny


@pytest.fixture
def read_with_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DecoderConfig]:
    """Reads a tiny model of an architecture into whose metadata `add(writer)` put something."""

    def make(
        architecture: str, add: Callable[[GGUFWriter], None], **options: object
    ) -> DecoderConfig:
        original = GGUFWriter.add_name

        def add_name(writer: GGUFWriter, name: str) -> None:
            original(writer, name)
            add(writer)

        monkeypatch.setattr(GGUFWriter, "add_name", add_name)
        return read(write_tiny(tmp_path, architecture, **options))[0]

    return make
