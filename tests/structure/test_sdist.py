"""The source distribution holds what a wheel is built from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_cython_sources_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    from setuptools.command.egg_info import FileList

    monkeypatch.chdir(ROOT)
    found = FileList()
    for line in Path("MANIFEST.in").read_text("ascii").splitlines():
        found.process_template_line(line)
    sources = [*Path("edgeh2o").rglob("*.pyx"), *Path("edgeh2o").rglob("*.pxd")]
    assert sources
    assert {str(path) for path in sources} <= set(found.files)


def test_tools_of_the_build_are_there() -> None:
    imports = re.findall(
        r"^from tools(\.\w+)? import (\w+)", (ROOT / "setup.py").read_text("ascii"), re.M
    )
    modules = {module.lstrip(".") or name for module, name in imports}
    assert modules >= {"build_cuda_images", "build_on_macos"}
    included = (ROOT / "MANIFEST.in").read_text("ascii").split()
    assert {f"tools/{module}.py" for module in modules} <= set(included)
