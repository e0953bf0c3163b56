"""Programs and libraries that tests link from the objects of the core."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tools import build_on_macos

ROOT = Path(__file__).resolve().parents[1]
IS_MACOS = sys.platform == "darwin"
# What makes a linker write an extension module.
MODULE_FLAGS = ["-bundle", "-undefined", "dynamic_lookup"] if IS_MACOS else ["-shared"]


def find_objects() -> Path:
    """Where the objects of a core lie: in ``EDGEH2O_OBJECTS``, or in a folder of build/."""
    if named := os.environ.get("EDGEH2O_OBJECTS"):
        return ROOT / named
    for folder in sorted(ROOT.glob(f"build/temp.*{sys.implementation.cache_tag}")):
        if any(folder.glob("build/joined/bindings_*.o")) and any(folder.glob("*.a")):
            return folder
    pytest.skip("needs the objects of a build in build/, which an installation by pip may remove")


def compiler() -> list[str]:
    """The command of the C++ compiler."""
    return os.environ.get("CXX", "c++").split()


def archives_of(objects: Path) -> list[str]:
    """What a linker is told to find the core's functions, in any order."""
    archives = [*map(str, sorted(objects.glob("*.a")))]
    return archives if IS_MACOS else ["-Wl,--start-group", *archives, "-Wl,--end-group"]


def openmp_flags() -> tuple[list[str], list[str]]:
    """Flags to compile and to link with OpenMP, as setup.py has them."""
    if not IS_MACOS:
        return ["-fopenmp"], ["-fopenmp"]
    return build_on_macos.openmp_flags(build_on_macos.find_libomp(platform.machine()))


def run(command: list[str], cwd: Path = ROOT) -> str:
    """Its standard output; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout
