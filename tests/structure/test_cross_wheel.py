"""The gate on aarch64 wheels finds what would fail on the device."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools import build_wheel_aarch64, check_wheel_aarch64, run_wheel_aarch64
from tools.aarch64_packages import STAMP, are_unpacked, unpack_packages
from tools.check_wheel_aarch64 import Library, check_libraries, check_wheel

COMPILER = build_wheel_aarch64.COMPILER
MODULE = Library(
    file="edgeh2o/_core.cpython-311-aarch64-linux-gnu.so",
    machine="AArch64",
    soname="_core.cpython-311-aarch64-linux-gnu.so",
    needed=("libstdc++.so.6", "libgomp-d199903e.so.1.0.0", "libc.so.6"),
    undefined=("free@GLIBC_2.17", "_Py_Dealloc", "PyErr_Clear", "GOMP_parallel@GOMP_4.0"),
    static_tls_bytes=0,
)
OPENMP = Library(
    file="edgeh2o.libs/libgomp-d199903e.so.1.0.0",
    machine="AArch64",
    soname="libgomp-d199903e.so.1.0.0",
    needed=("libdl.so.2", "libc.so.6"),
    undefined=("dlopen@GLIBC_2.17",),
    static_tls_bytes=120,
)


def check(module: Library, *others: Library, python: str = "cp311") -> list[str]:
    return check_libraries([module, *others], python, "manylinux_2_31")


def test_a_good_wheel_passes() -> None:
    assert check(MODULE, OPENMP) == []


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        ("__libc_single_threaded", "__libc_single_threaded is undefined and has no version"),
        ("dlopen", "dlopen is undefined and has no version"),
        ("Pythagoras", "Pythagoras is undefined and has no version"),
        ("fstat@GLIBC_2.33", "fstat needs GLIBC_2.33, the tag has 2.31"),
        ("x@GLIBCXX_3.4.29", "x needs GLIBCXX_3.4.29, the tag has 3.4.28"),
        ("ZSTD_free@ZSTD_1.0", "ZSTD_free needs ZSTD_1.0, which the tag does not have"),
    ],
)
def test_symbols_that_the_device_may_lack(symbol: str, problem: str) -> None:
    found = check(replace(MODULE, undefined=(*MODULE.undefined, symbol)), OPENMP)
    assert found == [f"{MODULE.file}: {problem}"]


def test_versions_are_compared_as_numbers() -> None:
    newest = ("free@GLIBC_2.9", "log@GLIBC_2.31", "x@GLIBCXX_3.4.9")
    assert check(replace(MODULE, undefined=newest), OPENMP) == []


def test_openmp_goes_into_the_wheel_once() -> None:
    outside = replace(MODULE, needed=("libgomp.so.1",))
    problem = f"{MODULE.file}: needs libgomp.so.1, which is not in the wheel"
    assert problem in check(outside, OPENMP)
    second = replace(OPENMP, soname="libgomp-0.so.1", static_tls_bytes=0)
    assert check(MODULE, OPENMP, second) == ["the wheel must hold one libgomp"]
    without_calls = replace(MODULE, needed=(), undefined=())
    assert check(without_calls) == ["the wheel must hold one libgomp"]


def test_another_machine_and_another_python_are_named() -> None:
    assert check(replace(MODULE, machine="Intel 80386"), OPENMP) == [
        f"{MODULE.file}: is for Intel 80386"
    ]
    assert check(MODULE, OPENMP, python="cp310") == [f"{MODULE.file}: is not for cp310"]
    assert check(OPENMP) == ["the wheel holds no extension module for aarch64"]


def test_static_thread_local_storage_is_bounded() -> None:
    assert check(MODULE, replace(OPENMP, static_tls_bytes=2048)) == [
        "static thread-local storage: 2048 > 256 bytes"
    ]


def test_an_unknown_tag_is_refused() -> None:
    (problem,) = check_libraries([MODULE, OPENMP], "cp311", "linux")
    assert problem.startswith("the tag linux is none of manylinux_2_17")


def write_wheel(folder: Path, source: str) -> Path:
    """A wheel of one module, which the cross compiler links against this Debian's libraries."""
    library = folder / "module.so"
    command = [COMPILER, "-shared", "-fPIC", "-ftls-model=initial-exec", "-x", "c++", "-"]
    subprocess.run([*command, "-o", str(library)], input=source, text=True, check=True)
    wheel = folder / "x-1-cp311-cp311-manylinux_2_31_aarch64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, MODULE.file)
    return wheel


@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"SKIPPED: no {COMPILER}")
def test_what_a_compiler_leaves_undefined_is_read(tmp_path: Path) -> None:
    source = """
    extern "C" { void no_such_library(); int getpid(); void _Py_Call(); }
    #pragma weak absent
    extern "C" void absent();
    thread_local int block[100];
    extern "C" int call() {
      no_such_library(); _Py_Call(); if (absent) absent();
      return block[getpid()];
    }
    """
    wheel = write_wheel(tmp_path, source)
    assert check_wheel(wheel) == [
        f"{MODULE.file}: no_such_library is undefined and has no version",
        "the wheel must hold one libgomp",
        "static thread-local storage: 400 > 256 bytes",
    ]
    assert check_wheel_aarch64.main([str(wheel)]) == 1


def test_a_file_that_is_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x-1-cp311-cp311-manylinux_2_31_aarch64.whl"
    path.write_text("no archive")
    assert check_wheel_aarch64.main([str(path)]) == 2
    assert "not a zip file" in capsys.readouterr().err


def test_missing_programs_of_the_build_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_wheel_aarch64, "search_path", lambda: "")
    assert build_wheel_aarch64.main([]) == build_wheel_aarch64.SKIPPED
    assert "g++-aarch64-linux-gnu" in capsys.readouterr().err


def test_what_the_quick_wheel_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing could be fetched, CI shows why the step is skipped."""
    monkeypatch.setattr(build_wheel_aarch64, "search_path", lambda: "")
    monkeypatch.setattr(build_wheel_aarch64, "find_sysroot", lambda: None)
    assert run_wheel_aarch64.main(["--quick"]) == run_wheel_aarch64.SKIPPED
    message = capsys.readouterr().err
    assert message.startswith("skipped: not there: ")
    for lacking in ("g++-aarch64-linux-gnu", "patchelf", "tools.build_wheel_aarch64 --fetch"):
        assert lacking in message


def test_packages_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    packages = ("libc6-dev", "libgcc-10-dev")
    assert not are_unpacked("bullseye", packages, tmp_path)
    (tmp_path / STAMP).write_text("bullseye\nlibc6-dev\nlibgcc-10-dev\n")
    assert are_unpacked("bullseye", packages, tmp_path)
    assert unpack_packages("bullseye", packages, tmp_path) == tmp_path
    assert not are_unpacked("bookworm", packages, tmp_path)
