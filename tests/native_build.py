"""Programs and libraries that tests link from the objects of the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
    return ["-Wl,--start-group", *map(str, sorted(objects.glob("*.a"))), "-Wl,--end-group"]


def run(command: list[str], cwd: Path = ROOT) -> str:
    """Its standard output; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout
