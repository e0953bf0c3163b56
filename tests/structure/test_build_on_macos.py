"""Builds on a Mac: one architecture, the libomp that is there, one line where something is not."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tools import build_on_macos
from tools.build_on_macos import CPU_TYPES, MacError, choose_platform, find_libomp
from tools.cross_check_aarch64 import Setup, read_setup

ROOT = Path(__file__).resolve().parents[2]


def thin(target: str) -> bytes:
    """The head of a Mach-O library for one architecture."""
    return struct.pack("<IIII", 0xFEEDFACF, CPU_TYPES[target], 0, 6)


def fat(*targets: str) -> bytes:
    """The head of a file that holds a library for each."""
    parts = [struct.pack(">IIIII", CPU_TYPES[target], 0, 4096, 100, 12) for target in targets]
    return struct.pack(">II", 0xCAFEBABE, len(targets)) + b"".join(parts)


def write_libomp(prefix: Path, library: bytes) -> Path:
    for name, content in (("include/omp.h", b""), ("lib/libomp.dylib", library)):
        path = prefix / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return prefix


def read_on_mac(prefix: Path, target: str = "arm64") -> Setup:
    return read_setup(f"macosx-14.0-{target}", LIBOMP_PREFIX=str(prefix))


def run_setup(before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = (
        "import runpy, sys, sysconfig, setuptools, pybind11, Cython.Build\n"
        "import tools.build_cuda_images\nsysconfig.get_config_vars()\n"
        f"sys.argv = ['setup.py', '--name']\n{before}\nrunpy.run_path('setup.py')"
    )
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("host", "variables", "chosen", "changed"),
    [
        ("macosx-14.0-arm64", {}, "macosx-14.0-arm64", {}),
        (
            "macosx-10.9-universal2",  # of python.org, on Apple silicon
            {},
            "macosx-11.0-arm64",
            {
                "ARCHFLAGS": "-arch arm64",
                "MACOSX_DEPLOYMENT_TARGET": "11.0",
                "_PYTHON_HOST_PLATFORM": "macosx-11.0-arm64",
            },
        ),
        (
            "macosx-10.13-universal2",
            {"ARCHFLAGS": "-arch x86_64", "MACOSX_DEPLOYMENT_TARGET": "12.3"},
            "macosx-12.3-x86_64",
            {"_PYTHON_HOST_PLATFORM": "macosx-12.3-x86_64"},
        ),
        (
            "macosx-10.13-x86_64",  # of conda
            {},
            "macosx-11.0-x86_64",
            {
                "MACOSX_DEPLOYMENT_TARGET": "11.0",
                "_PYTHON_HOST_PLATFORM": "macosx-11.0-x86_64",
            },
        ),
    ],
)
def test_a_build_is_for_one_architecture(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    variables: dict[str, str],
    chosen: str,
    changed: dict[str, str],
) -> None:
    monkeypatch.setattr(build_on_macos.platform, "machine", lambda: "arm64")
    environ = dict(variables)
    assert choose_platform(host, environ) == chosen
    assert environ == {**variables, **changed}


def test_a_universal_build_is_refused() -> None:
    environ = {"ARCHFLAGS": "-arch arm64 -arch x86_64"}
    with pytest.raises(MacError, match="one architecture at a time: set ARCHFLAGS='-arch arm64'"):
        choose_platform("macosx-11.0-universal2", environ)


@pytest.mark.parametrize("library", [thin("arm64"), fat("x86_64", "arm64")])
def test_libomp_is_where_its_variable_says(tmp_path: Path, library: bytes) -> None:
    prefix = write_libomp(tmp_path, library)
    assert find_libomp("arm64", {"LIBOMP_PREFIX": str(prefix)}) == prefix


@pytest.mark.parametrize("library", [thin("x86_64"), fat("x86_64"), b"", b"\x7fELF" + bytes(60)])
def test_libomp_of_another_processor_is_refused(tmp_path: Path, library: bytes) -> None:
    write_libomp(tmp_path, library)
    with pytest.raises(MacError, match=r"libomp for arm64, .*libomp.dylib is for another"):
        find_libomp("arm64", {"LIBOMP_PREFIX": str(tmp_path)})


def test_libomp_of_conda_and_of_homebrew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conda = write_libomp(tmp_path / "conda", thin("x86_64"))
    homebrew = write_libomp(tmp_path / "homebrew", thin("arm64"))
    brew = tmp_path / "bin" / "brew"
    brew.parent.mkdir()
    brew.write_text(f'#!/bin/sh\n[ "$*" = "--prefix libomp" ] && echo {homebrew}\n')
    brew.chmod(0o755)
    monkeypatch.setenv("PATH", f"{brew.parent}{os.pathsep}{os.environ['PATH']}")
    environ = {"CONDA_PREFIX": str(conda)}
    assert find_libomp("x86_64", environ) == conda
    assert find_libomp("arm64", environ) == homebrew


def test_without_libomp_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MacError, match="brew install libomp, or conda install llvm-openmp"):
        find_libomp("arm64", {})
    result = run_setup(_PYTHON_HOST_PLATFORM="macosx-14.0-arm64", LIBOMP_PREFIX=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"edgeh2o needs OpenMP, and LIBOMP_PREFIX={tmp_path} has no include/omp.h and "
        "lib/libomp.dylib"
    ]


@pytest.mark.parametrize(
    ("target", "tables"),
    [
        ("arm64", {"neon", "neon_dotprod", "neon_i8mm"}),
        ("x86_64", {"avx2", "avxvnni", "avx512vnni", "avx512bf16"}),
    ],
)
def test_flags_are_those_of_clang_and_of_the_processor(
    tmp_path: Path, target: str, tables: set[str]
) -> None:
    setup = read_on_mac(write_libomp(tmp_path, thin(target)), target)
    names = {name.removeprefix("edgeh2o_") for name in setup.libraries}
    assert names == {"core", "scalar", *tables}
    for name, units in setup.libraries.items():
        flags = units[0].flags
        assert ("-Xpreprocessor" in flags) == (name == "edgeh2o_core")
        before = [flags[i - 1] for i, flag in enumerate(flags) if flag == "-fopenmp"]
        assert before == ["-Xpreprocessor"] * (name == "edgeh2o_core")
    linked = setup.modules[0]["extra_link_args"]
    library = tmp_path / "lib"
    assert linked == [f"-L{library}", "-lomp", f"-Wl,-rpath,{library}"]


def test_windows_gets_one_line() -> None:
    result = run_setup("sys.platform = 'win32'")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "does not run on Windows itself: install it in Ubuntu under WSL 2" in line
