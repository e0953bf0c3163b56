"""Fixtures that tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import TinyModelFactory


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a long context, of which the cache folder knows nothing."""
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    return tiny_model(tensor_type="Q8_0", context_length=16384, n_heads=4, model_dim=128)
