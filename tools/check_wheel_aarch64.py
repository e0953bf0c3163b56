"""Checks that an aarch64 wheel will load wherever its tag says that it does.

    python -m tools.check_wheel_aarch64 build/wheels-aarch64/*.whl

A cross build can link and be tagged, and still fail at import on the device. For every shared
object of the wheel: it is of aarch64 and of the CPython of the tag; every undefined symbol has
a version that the tag promises, or is of CPython's API (an unversioned one comes from a newer
toolchain's static library or from a library that was not linked, and auditwheel passes it); every
library that it needs is promised by the tag or in the wheel, OpenMP's once; and the
thread-local storage that must lie in the process's static block is small, because late imports
share what little of it is left ("cannot allocate memory in static TLS block").

Prints a line per problem; the exit code is 1 if there is any, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a system with the tag's glibc has at most: PEP 600, auditwheel's manylinux-policy.json.
TAG_VERSIONS = {
    "manylinux_2_17": {"GLIBC": "2.17", "GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.7.0"},
    "manylinux_2_27": {"GLIBC": "2.27", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
    "manylinux_2_28": {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
    "manylinux_2_31": {"GLIBC": "2.31", "GLIBCXX": "3.4.28", "CXXABI": "1.3.12", "GCC": "7.0.0"},
    "manylinux_2_34": {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "11.0"},
}
PROMISED_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libstdc++.so.6",
}
PYTHON_API = re.compile(r"_?Py[A-Z_]\w*")
# glibc 2.31 keeps 1,664 bytes for libraries that are loaded late; others need some too.
MAX_STATIC_TLS_BYTES = 256

FILE_TAG = re.compile(r"\.cpython-(\d+)-aarch64-linux-gnu\.so$")
# A row of readelf --dyn-syms: "12: 0 0 FUNC GLOBAL DEFAULT UND free@GLIBC_2.17 (2)".
UNDEFINED = re.compile(r"^\s*\d+:\s+\S+\s+\d+\s+\w+\s+(\w+)\s+\w+\s+.*?UND (\S+)", re.MULTILINE)
NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]")
NAME = re.compile(r"\(SONAME\).*\[(.*)\]")
TLS_SEGMENT = re.compile(r"^\s*TLS\s+\S+\s+\S+\s+\S+\s+\S+\s+(0x[0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Library:
    """What the dynamic linker reads in a shared object.

    Attributes:
        file: path inside the wheel.
        machine: as readelf names it.
        soname: name by which others need it; its file name if it has none.
        needed: names of libraries.
        undefined: symbols with their version, "free@GLIBC_2.17", that must be found.
        static_tls_bytes: thread-local storage that has to be in the static block.
    """

    file: str
    machine: str
    soname: str
    needed: tuple[str, ...]
    undefined: tuple[str, ...]
    static_tls_bytes: int


def read_library(path: Path, file: str) -> Library:
    """Reads a shared object with readelf.

    Raises:
        subprocess.CalledProcessError: if it is not an ELF file.
    """
    command = ["readelf", "--wide", "-h", "-d", "-l", "-r", "--dyn-syms", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    machine = re.search(r"Machine:\s*(.*)", text)
    soname = NAME.search(text)
    tls = TLS_SEGMENT.search(text)
    is_static = "R_AARCH64_TLS_TPREL" in text or "STATIC_TLS" in text
    return Library(
        file,
        machine.group(1) if machine else "none",
        soname.group(1) if soname else Path(file).name,
        tuple(NEEDED.findall(text)),
        tuple(name for bind, name in UNDEFINED.findall(text) if bind != "WEAK"),
        int(tls.group(1), 16) if tls and is_static else 0,
    )


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def check_symbol(symbol: str, limits: dict[str, str], own_names: Iterable[str]) -> str | None:
    """Why `symbol` may be missing at run time, or None."""
    name, _, version = symbol.replace("@@", "@").partition("@")
    if not version:
        return None if PYTHON_API.fullmatch(name) else f"{name} is undefined and has no version"
    family, _, number = version.partition("_")
    if family in limits:
        is_newer = parse_version(number) > parse_version(limits[family])
        return f"{name} needs {version}, the tag has {limits[family]}" if is_newer else None
    # Of a library in the wheel: libgomp's families are OMP, GOMP and OACC.
    is_own = any(own.startswith("libgomp") for own in own_names) and "OMP" in family
    return None if is_own else f"{name} needs {version}, which the tag does not have"


def check_libraries(libraries: Sequence[Library], python_tag: str, tag: str) -> list[str]:
    """Problems of a wheel's shared objects under a platform tag such as "manylinux_2_31"."""
    if tag not in TAG_VERSIONS:
        return [f"the tag {tag} is none of {', '.join(TAG_VERSIONS)}"]
    own = {library.soname for library in libraries}
    problems = []
    for library in libraries:
        found = []
        if library.machine != "AArch64":
            found.append(f"is for {library.machine}")
        version = FILE_TAG.search(library.file)
        if version and f"cp{version.group(1)}" != python_tag:
            found.append(f"is not for {python_tag}")
        missing = [name for name in library.needed if name not in PROMISED_LIBRARIES | own]
        found += [f"needs {name}, which is not in the wheel" for name in missing]
        checked = (check_symbol(symbol, TAG_VERSIONS[tag], own) for symbol in library.undefined)
        found += [problem for problem in checked if problem]
        problems += [f"{library.file}: {problem}" for problem in found]
    if len([name for name in own if name.startswith("libgomp")]) != 1:
        problems.append("the wheel must hold one libgomp")
    if not any(FILE_TAG.search(library.file) for library in libraries):
        problems.append("the wheel holds no extension module for aarch64")
    if (n_bytes := sum(library.static_tls_bytes for library in libraries)) > MAX_STATIC_TLS_BYTES:
        problems.append(f"static thread-local storage: {n_bytes} > {MAX_STATIC_TLS_BYTES} bytes")
    return problems


def check_wheel(wheel: Path) -> list[str]:
    """Problems of a wheel, one line each.

    Raises:
        OSError, zipfile.BadZipFile: if it cannot be read.
        subprocess.CalledProcessError: if a file named *.so is not an ELF file.
    """
    _, _, python_tag, _, platforms = wheel.stem.rsplit("-", 4)
    # Of several tags the oldest counts.
    tags = [name.removesuffix("_aarch64") for name in platforms.split(".")]
    tag = min(tags, key=lambda name: parse_version(".".join(re.findall(r"\d+", name)) or "0"))
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"\.so(\.|$)", name)]
        libraries = [read_library(Path(archive.extract(name, folder)), name) for name in names]
    return check_libraries(libraries, python_tag, tag)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    is_clean = True
    for wheel in parser.parse_args(argv).wheels:
        try:
            problems = check_wheel(wheel)
        except (OSError, ValueError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
            print(f"{wheel}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
            return 2
        print(f"{wheel.name}: {'problems' if problems else 'loads where its tag says'}")
        for problem in problems:
            print(f"  {problem}")
        is_clean &= not problems
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
