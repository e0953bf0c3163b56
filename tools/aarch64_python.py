"""A Python of Debian arm64, run by qemu-user, with aarch64 wheels installed for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import aarch64_packages
from tools.aarch64_packages import PackageError, unpack_packages

EMULATOR = "qemu-aarch64"
# The Debian release that holds each version of CPython; None: no release does.
SUITES = {"3.10": None, "3.11": "bookworm", "3.13": "trixie"}
REQUIRED_PROGRAMS = {EMULATOR: "Debian package qemu-user", **aarch64_packages.REQUIRED_PROGRAMS}
# What would reach from the caller's environment into the emulated process and change it.
PRIVATE_VARIABLES = re.compile(r"EDGEH2O_|PYTHON|PIP_|LD_|OMP_|GOMP_")


class InstallError(Exception):
    """pip cannot install a package for aarch64; the message is pip's."""


@dataclass(frozen=True, slots=True)
class EmulatedPython:
    """An interpreter unpacked in `root`, which imports what is installed in `site`."""

    version: str
    root: Path
    site: Path

    def command(self, processor: str, arguments: Sequence[str | Path]) -> list[str]:
        """The command that runs the interpreter on a processor model of qemu."""
        interpreter = self.root / f"usr/bin/python{self.version}"
        emulator = [EMULATOR, "-L", str(self.root), "-cpu", processor]
        return [*emulator, str(interpreter), *map(str, arguments)]

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not PRIVATE_VARIABLES.match(k)}
        return {**kept, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1", **variables}

    def run(
        self, processor: str, arguments: Sequence[str | Path], **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(processor, arguments),
            env=self.environment(**variables),
            capture_output=True,
            text=True,
        )


def platform_tags(root: Path) -> Iterator[str]:
    """Tags of the wheels that run on the C library in `root`, newest first."""
    (library,) = root.glob("usr/lib/aarch64-linux-gnu/libc.so.6")
    versions = re.findall(rb"GNU C Library .* version 2\.(\d+)", library.read_bytes())
    for minor in range(int(versions[0]), 16, -1):
        yield f"manylinux_2_{minor}_aarch64"
    yield "manylinux2014_aarch64"


def find_missing() -> list[str]:
    return [what for name, what in REQUIRED_PROGRAMS.items() if not shutil.which(name)]


def unpack_python(version: str, build_dir: Path) -> Path:
    """Root folder of Debian's Python of this version, with its headers.

    Raises:
        PackageError: if no Debian release has it, or it cannot be downloaded.
    """
    suite = SUITES[version]
    if suite is None:
        raise PackageError(f"no Debian release has CPython {version}")
    packages = [f"python{version}", f"libpython{version}-dev", "libstdc++6"]
    return unpack_packages(suite, packages, build_dir / f"python{version}")


def install_python(version: str, requirements: Sequence[str], build_dir: Path) -> EmulatedPython:
    """Unpacks Debian's Python and installs requirements, with their dependencies, for it.

    Args:
        version: a key of SUITES that Debian has.
        requirements: as pip takes them: names, or paths of wheels.
        build_dir: where the interpreter is kept; the packages are installed anew each time.

    Raises:
        PackageError: if Debian's packages cannot be had.
        InstallError: if pip finds no wheel of a requirement that this interpreter runs.
    """
    root = unpack_python(version, build_dir)
    site = build_dir / f"site{version}"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    command += [f"--platform={tag}" for tag in platform_tags(root)]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if result.returncode != 0:
        raise InstallError(result.stderr)
    return EmulatedPython(version, root, site)
