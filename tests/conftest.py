"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeh2o.errors import ResourceError
from edgeh2o.formats.pull import resolve_model

pytest_plugins = ["tests.tiny_models"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model. Tests that use it are skipped without a network, and fail under CI."""
    try:
        return resolve_model("smollm2-135m")
    except ResourceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the default model: {error}")
