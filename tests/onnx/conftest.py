"""Folders with tiny ONNX models, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgeh2o.export.decoder import DecoderExporter
from edgeh2o.export.onnx import export_model
from tests.tiny_models import TinyModelFactory

OnnxModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def onnx_model(
    tiny_model: TinyModelFactory, tmp_path_factory: pytest.TempPathFactory
) -> OnnxModelFactory:
    """`onnx_model(variant, tensor_type="F32", ...)` -> folder; the options are of TinyModel."""
    root = tmp_path_factory.mktemp("onnx_models")
    folders: dict[object, Path] = {}

    def make(
        variant: type[DecoderExporter] = DecoderExporter,
        *,
        last_logits_only: bool = False,
        **options: object,
    ) -> Path:
        key = (variant, last_logits_only, *sorted(options.items()))
        if key not in folders:
            folder = root / f"{variant.__name__}-{len(folders)}"
            export_model(
                tiny_model(**options),
                folder,
                last_logits_only=last_logits_only,
                exporter=variant,
            )
            folders[key] = folder
        return folders[key]

    return make
