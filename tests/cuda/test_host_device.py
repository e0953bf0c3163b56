"""The host device finds what is wrong with a kernel; the kernels pass under sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda.host_library import (
    OPTIMISED,
    ROOT,
    SANITIZERS,
    SOURCES,
    build,
    build_driver,
    compiler,
    sanitizer_environment,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="the host device needs g++")
BLOCK = [path for path in SOURCES if path.name != "driver.cc"]
MODELS = (
    "test_architectures.py::test_architectures[unequal]",
    "test_architectures.py::test_architectures[qwen35]",
    "test_architectures.py::test_architectures[nemotron_h_moe]",
    "test_architectures.py::test_tensor_types[Q4_1]",
    "test_guard.py::test_statistics_tell_of_it",
    "test_sessions.py::test_a_prompt_moves_to_another_session",
    "test_latent.py::test_quantised_weights[Q8_0-True]",
)
PLANTED = ROOT / "tests/cuda/planted.cc"
# What the program says, without and with sanitizers.
FOUND = {
    "wait": ("wrong sums", "use-after-poison"),
    "barrier": ("wrong sums", "wrong sums"),  # read before the copy is asked for
    "second barrier": ("wrong sums", "use-after-poison"),
    "warp barrier": ("wrong lanes", "wrong lanes"),
    "diverged": ("do not meet", "do not meet"),
    "left out": ("others wait at a barrier", "others wait at a barrier"),
    "unaligned": ("not aligned", "not aligned"),
    "outside": ("wrong sums", "heap-buffer-overflow"),
    "shared": ("wrong sums", "AddressSanitizer"),
}


def run_planted(fault: str, *, sanitized: bool) -> subprocess.CompletedProcess[str]:
    flags = SANITIZERS if sanitized else OPTIMISED
    program = build("planted_sanitized" if sanitized else "planted", [*BLOCK, PLANTED], *flags)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program, fault], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("sanitized", [False, True])
def test_a_kernel_without_faults_passes(sanitized: bool) -> None:
    result = run_planted("none", sanitized=sanitized)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


@pytest.mark.parametrize("sanitized", [False, True])
@pytest.mark.parametrize("fault", FOUND)
def test_planted_faults_are_found(fault: str, sanitized: bool) -> None:
    result = run_planted(fault, sanitized=sanitized)
    assert result.returncode != 0
    assert FOUND[fault][sanitized] in result.stdout + result.stderr


@pytest.mark.first
def test_kernels_and_models_under_sanitizers() -> None:
    """In a Python of their own: every seventh test of the kernels, buffers of a few models."""
    if "EDGEH2O_TEST_CUDA_DRIVER" in os.environ:
        pytest.skip("this is that Python")
    driver = build_driver(sanitized=True)
    environment = os.environ | sanitizer_environment() | {"EDGEH2O_TEST_CUDA_DRIVER": str(driver)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    models = [f"tests/cuda/models/{name}" for name in MODELS]
    for tests, step in ((["tests/cuda/kernels"], "7"), (models, "1")):
        result = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment | {"EDGEH2O_TEST_STEP": step},
        )
        assert result.returncode == 0, result.stdout + result.stderr
