"""Compile and link everything for macOS, by the clang and the headers of PyPI's ziglang.

    python -m tools.check_macos [--fetch] [--target arm64] [--quick] [--syntax]

Sources and flags are those that setup.py has on a Mac: the core, the kernel tables, the policies,
the bindings and the Cython modules become the extension modules of the package, and the core with
the kernel self-test a program that links without leaving a name to be found later. The headers of
Python are this one's: what depends on the machine is told by its pymacconfig.h. Nothing is run.
With ziglang come clang, the C headers of macOS and a libc++, which is linked in; what that of
OLDEST_MACOS lacks is an error all the same. libomp and its header are of PyPI's cmeel-libomp.

--fetch gets both into build/macos. --quick optimises less. --syntax compiles only the files that
look at the system, without code. Exit status: 0 passed, 1 failed, 77 skipped because something is
missing (stderr names it).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.build_on_macos import OLDEST_MACOS
from tools.cross_check_aarch64 import (
    ROOT,
    SKIPPED,
    CheckFailedError,
    Setup,
    Toolchain,
    Unit,
    compile_units,
    link,
    read_setup,
    read_units,
    run_compiler,
)
from tools.quick_wheel_aarch64 import cython_source

BUILD = ROOT / "build" / "macos"
VERSION = ".".join(map(str, OLDEST_MACOS))
ZIG, LIBOMP = "ziglang==0.17.1", "cmeel-libomp==21.1.8"
# What zig calls an architecture, and the tag of the wheel of libomp.
TARGETS = {"arm64": ("aarch64", "macosx_11_0_arm64"), "x86_64": ("x86_64", "macosx_10_9_x86_64")}
# Of Python, which is there once a module is loaded: Py_True, _Py_Dealloc, with C's underscore.
PYTHON_NAME = re.compile(r"__?Py\w+")
# What asks the system, by headers or by name.
SYSTEM = re.compile(r"__APPLE__|#include <(?:sys/|unistd|dlfcn|pthread|omp)")


@dataclass(frozen=True, slots=True)
class Mac:
    """An architecture, and the tools that build for it."""

    target: str
    zig: Path
    libomp: Path

    @property
    def zig_target(self) -> str:
        return f"{TARGETS[self.target][0]}-macos.{VERSION}-none"

    @property
    def clang(self) -> tuple[str, ...]:
        """clang itself, which takes flags of processors as Apple's does; `zig c++` does not."""
        return (str(self.zig), "clang", "-target", f"{self.target}-apple-macosx{VERSION}")

    @property
    def linker(self) -> Toolchain:
        return Toolchain(compiler=(str(self.zig), "c++", "-target", self.zig_target))


def zig_environment() -> None:
    """Lets zig keep what it compiles, libc++ at the first link, in the folder of this build."""
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(BUILD / "zig-cache")
    os.environ["ZIG_LOCAL_CACHE_DIR"] = str(BUILD / "zig-cache")


def fetch() -> None:
    """Gets what is not there yet from PyPI. Raises CalledProcessError where pip cannot."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    if not zig_path().exists():
        subprocess.run([*pip, "--target", str(BUILD / "zig"), ZIG], check=True)
    for target, (_, tag) in TARGETS.items():
        if not libomp_path(target).exists():
            command = [*pip, "--target", str(BUILD / f"libomp-{target}"), "--platform", tag]
            subprocess.run([*command, LIBOMP], check=True)


def zig_path() -> Path:
    return BUILD / "zig" / "ziglang" / "zig"


def libomp_path(target: str) -> Path:
    return BUILD / f"libomp-{target}" / "cmeel.prefix"


def find_missing(targets: Sequence[str]) -> list[str]:
    missing = [] if zig_path().exists() else [ZIG]
    return missing + [f"{LIBOMP} ({t})" for t in targets if not libomp_path(t).exists()]


def find_toolchain(mac: Mac, setup: Setup, *, is_quick: bool) -> Toolchain:
    """clang with the headers that `zig c++` would give it, for the same target."""
    command = [str(mac.zig), "c++", "-target", mac.zig_target, "-x", "c++", "-v", "-E", os.devnull]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    words = next((line for line in result.stderr.splitlines() if " -cc1 " in line), "")
    flags = ["-nostdinc"]
    parts = shlex.split(words)
    for option, value in pairwise(parts):
        if option == "-isystem":
            flags += [option, str((ROOT / value).resolve())]
        elif option == "-D" and "VENDOR_AVAILABILITY" not in value:
            flags.append(f"-D{value}")
    if not any("libcxx" in flag for flag in flags):
        raise CheckFailedError(f"{shlex.join(command)} names no headers:\n{result.stderr}")
    # What the oldest system's libc++ lacks is an error.
    flags.append("-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1")
    unknown = tuple(flag for flag in setup.optional if not is_known(mac, flag))
    return Toolchain(tuple(flags), (), is_quick, mac.clang, unknown)


def is_known(mac: Mac, flag: str) -> bool:
    """As in setup.py."""
    command = [*mac.clang, "-Werror", flag, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def unit_of(source: str, flags: tuple[str, ...], core: Unit, generated: Path) -> Unit:
    """A source of an extension module. Policies are units of the program too."""
    if source.startswith("cpp/sparse/"):
        return Unit(source, core.flags)
    return Unit(cython_source(source, generated) if source.endswith(".pyx") else source, flags)


def foreign_names(errors: str) -> list[str]:
    """Of what a linker says the names that are missing and not Python's."""
    names = dict.fromkeys(re.findall(r"undefined symbol: (\S+)", errors))
    return [name for name in names if not PYTHON_NAME.fullmatch(name)]


def archive(name: str, objects: Sequence[Path], mac: Mac) -> Path:
    """A static library, from which the linker takes what it needs."""
    path = BUILD / mac.target / f"lib{name}.a"
    path.unlink(missing_ok=True)
    run_compiler([str(mac.zig), "ar", "rcs", str(path), *map(str, objects)])
    return path


def build_module(module: dict[str, Any], objects: list[Path], mac: Mac) -> None:
    """Links an extension module, as a library: zig's linker writes no bundles.

    Raises CheckFailedError where it lacks what Python will not give it.
    """
    output = BUILD / mac.target / f"{module['name']}.so"
    options = ["-shared", *module["extra_link_args"]]
    strict = output.with_suffix(".strict.so")  # not os.devnull: zig would not link at all
    command = [*mac.linker.compiler, *map(str, objects), *options, "-o", str(strict)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if foreign := foreign_names(result.stderr):
        raise CheckFailedError(f"{module['name']}: undefined: {', '.join(foreign)}")
    if "_Py" not in result.stderr:
        raise CheckFailedError(f"{module['name']}: it uses nothing of Python:\n{result.stderr}")
    link(objects, output, mac.linker, *options, "-undefined", "dynamic_lookup")


def build(mac: Mac, *, is_quick: bool) -> None:
    """Raises CheckFailedError where something does not compile or link."""
    setup = read_setup(f"macosx-{VERSION}-{mac.target}", LIBOMP_PREFIX=str(mac.libomp))
    toolchain = find_toolchain(mac, setup, is_quick=is_quick)
    folder = BUILD / mac.target
    includes = tuple(
        f"-I{path}" for path in (sysconfig.get_path("include"), "cpp", *sorted(include_dirs(setup)))
    )
    core = setup.libraries["edgeh2o_core"][0]
    program = read_units(setup)
    modules = {
        module["name"]: [
            unit_of(source, (*module["extra_compile_args"], *includes), core, BUILD / "cython")
            for source in module["sources"]
        ]
        for module in setup.modules
    }
    every = list(dict.fromkeys([*program, *(unit for some in modules.values() for unit in some)]))
    objects = dict(zip(every, compile_units(every, folder, toolchain), strict=True))
    openmp = setup.modules[0]["extra_link_args"]
    link([objects[u] for u in program], folder / "kernel_selftest", mac.linker, *openmp)
    # Archives, as on a Mac: modules without policies need not what refers to them.
    libraries = [
        archive(name, [objects[unit] for unit in some], mac)
        for name, some in setup.libraries.items()
    ]
    for module in setup.modules:
        own = [objects[unit] for unit in modules[module["name"]]]
        build_module(module, [*own, *libraries], mac)


def include_dirs(setup: Setup) -> set[str]:
    return {path for module in setup.modules for path in module["include_dirs"]}


def check_syntax(mac: Mac) -> None:
    """Compiles what asks the system as far as its meaning. Raises CheckFailedError."""
    setup = read_setup(f"macosx-{VERSION}-{mac.target}", LIBOMP_PREFIX=str(mac.libomp))
    toolchain = find_toolchain(mac, setup, is_quick=True)
    for unit in setup.libraries["edgeh2o_core"]:
        if SYSTEM.search((ROOT / unit.source).read_text(encoding="utf-8")):
            command = [*toolchain.compiler, *toolchain.flags_of(unit), "-Icpp", "-fsyntax-only"]
            run_compiler([*command, unit.source])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetch", action="store_true", help="get compiler and libomp from PyPI")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="optimise less")
    parser.add_argument("--syntax", action="store_true", help="only what asks the system")
    arguments = parser.parse_args(argv)
    zig_environment()
    try:
        if arguments.fetch:
            fetch()
        if missing := find_missing(arguments.target):
            print(f"skipped: not there: {', '.join(missing)} (--fetch)", file=sys.stderr)
            return SKIPPED
        for target in arguments.target:
            mac = Mac(target, zig_path(), libomp_path(target))
            if arguments.syntax:
                check_syntax(mac)
            else:
                build(mac, is_quick=arguments.quick)
            print(f"{target}: compiled" + ("" if arguments.syntax else " and linked"))
    except subprocess.CalledProcessError:
        print("skipped: PyPI cannot be reached; the error of pip is above", file=sys.stderr)
        return SKIPPED
    except CheckFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
