"""The host device, built where there is a compiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cuda.device import Device
from tests.cuda.host_library import build_driver, compiler


@pytest.fixture(scope="session")
def host_driver() -> Path:
    """The library. EDGEH2O_TEST_CUDA_DRIVER names another, such as a sanitized one."""
    named = os.environ.get("EDGEH2O_TEST_CUDA_DRIVER")
    if named:
        return Path(named)
    if compiler() is None:
        pytest.skip("the host device needs g++")
    return build_driver()


@pytest.fixture(scope="session")
def device(host_driver: Path) -> Device:
    return Device(host_driver)
