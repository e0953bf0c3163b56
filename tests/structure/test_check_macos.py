"""The check of builds for Macs: what it tells apart, and where it has its tools, what it finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import check_macos
from tools.check_macos import TARGETS, foreign_names

ROOT = Path(__file__).resolve().parents[2]


def test_names_that_python_does_not_have_are_found() -> None:
    errors = """error: undefined symbol: _PyLong_AsLong
    note: referenced by /m.o:_PyInit_m
error: undefined symbol: __Py_NoneStruct
error: undefined symbol: _getauxval
    note: referenced by /m.o:_PyInit_m
error: undefined symbol: __ZN7edgeh2o6PythonEv
error: undefined symbol: _getauxval
"""
    assert foreign_names(errors) == ["_getauxval", "__ZN7edgeh2o6PythonEv"]


def test_what_was_not_fetched_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", "")
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", "")
    monkeypatch.setattr(check_macos, "BUILD", tmp_path)
    assert check_macos.main(["--target", "arm64"]) == check_macos.SKIPPED
    message = capsys.readouterr().err
    assert message.startswith("skipped: not there: ziglang==")
    assert re.search(r"cmeel-libomp==\S+ \(arm64\) \(--fetch\)$", message.strip())


def test_the_quick_part_looks_at_what_asks_the_system() -> None:
    sources = {
        str(path.relative_to(ROOT / "cpp"))
        for path in (ROOT / "cpp").rglob("*.cc")
        if check_macos.SYSTEM.search(path.read_text("utf-8"))
    }
    asking = {"arena", "cpu_features", "mapped_file", "parallel"}
    assert {f"base/{name}.cc" for name in asking} | {"cuda/driver.cc"} <= sources
    assert "ops/matmul.cc" not in sources


@pytest.mark.parametrize("target", TARGETS)
def test_what_asks_the_system_compiles(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if check_macos.find_missing([target]):
        pytest.skip("python -m tools.check_macos --fetch gets the compiler")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", "")
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", "")
    assert check_macos.main(["--syntax", "--target", target]) == 0, capsys.readouterr().err
