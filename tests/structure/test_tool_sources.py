"""The C++ of tools and of the kernel self-test keeps up with the core."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "c++").split()[-1]


@pytest.mark.parametrize(
    "source",
    [
        "tools/instruction_counts/edgeh2o.cc",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "tests/kernels/selftest").glob("*.cc")),
    ],
)
def test_compiles(source: str) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-Icpp", "-I.", source]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
