"""The source distribution holds what a wheel is built from."""

from __future__ import annotations

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
