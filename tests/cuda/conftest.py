"""The host device, built where there is a compiler."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from tests.cuda.host_library import build_driver, compiler
from tools.cuda_driver import Device


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


@pytest.fixture(scope="session")
def host_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that only the host device takes."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "kernels_sm_87.z").write_bytes(zlib.compress(b"\x7fELF"))
    report = {"sources": "none", "images": {"sm_87": "nobody"}}
    (folder / "images.json").write_text(json.dumps(report), encoding="ascii")
    return folder


@pytest.fixture
def host_environment(host_driver: Path, host_images: Path) -> dict[str, str]:
    """What makes ``--device cuda`` of another process the host device."""
    return {"EDGEH2O_LIBCUDA": str(host_driver), "EDGEH2O_CUDA_IMAGES": str(host_images)}


@pytest.fixture
def host_device(
    host_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The same for this process, which keeps the driver that it opened first.

    EDGEH2O_TEST_CUDA_IMAGES=1 leaves the package's own images, for a real driver.
    """
    if os.environ.get("EDGEH2O_TEST_CUDA_IMAGES") == "1":
        del host_environment["EDGEH2O_CUDA_IMAGES"]
    for name, value in host_environment.items():
        monkeypatch.setenv(name, value)
    return host_environment
