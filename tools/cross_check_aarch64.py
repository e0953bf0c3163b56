"""Cross-compile the C++ core for aarch64 and run kernel_selftest under qemu.

    python -m tools.cross_check_aarch64 [--build-dir build/aarch64] [--quick] [--build-only]

Sources and flags are those of setup.py; headers and libraries are those of the wheels where
tools.build_wheel_aarch64 --fetch has got them, so that a wheel can be made of the same objects
(tools.quick_wheel_aarch64), else those beside the compiler. For every emulated processor the set of
kernel tables is compared with the instructions that the processor has, and its strongest tables are
checked. The loader of GPUs finds no driver there, and with the host device of the tests it gets
right products. --quick optimises less, like the wheel of tools.quick_wheel_aarch64, which takes the
same objects: kernels compile in two thirds of the time. --build-only runs nothing.
Exit status: 0 passed, 1 failed, 77 skipped because a tool is missing (stderr names the package).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda import host_library
from tools import build_wheel_aarch64

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "aarch64"
QUICK_BUILD = BUILD / "quick"
COMPILER = build_wheel_aarch64.COMPILER
EMULATOR = "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
SELFTEST = "tests/kernels/selftest"
SKIPPED = 77

REQUIRED_PROGRAMS = {COMPILER: "Debian package g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
REQUIRED_MODULES = ("setuptools", "pybind11", "Cython")

# Reads setup.py without running it and prints what it builds; cythonize would write files.
READ_SETUP = """
import json, setuptools, Cython.Build
from distutils.core import run_setup
Cython.Build.cythonize = lambda modules, **options: modules
setup = run_setup("setup.py", stop_after="init")
fields = ("name", "sources", "include_dirs", "extra_compile_args", "extra_link_args")
modules = [{field: getattr(module, field) for field in fields} for module in setup.ext_modules]
optional = setup.cmdclass["build_ext"].build_extensions.__globals__["OPTIONAL"]
print(json.dumps([setup.libraries, modules, sorted(optional)]))
"""


class CheckFailedError(Exception):
    """A build step or a comparison failed; the message says which."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One source file, relative to the repository, and the flags that it is compiled with."""

    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Processor:
    """A qemu processor model, the tables that it runs and those to check on it."""

    name: str
    tables: tuple[str, ...]
    checked: tuple[str, ...]


PROCESSORS = (
    Processor("cortex-a72", ("scalar", "neon"), ("scalar", "neon")),
    Processor("cortex-a76", ("scalar", "neon", "neon_dotprod"), ("neon_dotprod",)),
    Processor("max", ("scalar", "neon", "neon_dotprod", "neon_i8mm"), ("neon_i8mm",)),
)


def find_missing() -> list[str]:
    missing = [package for name, package in REQUIRED_PROGRAMS.items() if not shutil.which(name)]
    return missing + [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class Setup:
    """What setup.py builds: static libraries by name, the core first, and extension modules.

    ``optional``: flags that a compiler need not know.
    """

    libraries: dict[str, tuple[Unit, ...]]
    modules: tuple[dict[str, Any], ...]
    optional: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What the compiler gets besides: flags always, libraries when it links.

    ``is_quick``: -O1 where a unit has more. ``unknown``: flags of units that it cannot take.
    """

    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    is_quick: bool = False
    compiler: tuple[str, ...] = (COMPILER,)
    unknown: tuple[str, ...] = ()

    def flags_of(self, unit: Unit) -> list[str]:
        level = {"-O2": "-O1", "-O3": "-O1"} if self.is_quick else {}
        known = (flag for flag in unit.flags if flag not in self.unknown)
        return [*self.flags, *(level.get(flag, flag) for flag in known)]


def find_toolchain(*, is_quick: bool = False) -> Toolchain:
    """That of the wheels, if their sysroot has been fetched; in any case for shared libraries."""
    sysroot = build_wheel_aarch64.find_sysroot()
    if sysroot is None:
        return Toolchain(("-fPIC",), is_quick=is_quick)
    flags = build_wheel_aarch64.compiler_flags(sysroot)
    return Toolchain(("-fPIC", *flags), build_wheel_aarch64.LIBRARIES, is_quick)


def read_setup(platform: str = "linux-aarch64", **variables: str) -> Setup:
    """Runs setup.py for a platform up to its lists. Raises CheckFailedError where that fails."""
    result = subprocess.run(
        [sys.executable, "-c", READ_SETUP],
        cwd=ROOT,
        env={**os.environ, "_PYTHON_HOST_PLATFORM": platform, **variables},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise CheckFailedError(f"setup.py cannot be read:\n{result.stderr}")
    libraries, modules, optional = json.loads(result.stdout)
    units = {
        name: tuple(Unit(source, tuple(info["cflags"])) for source in info["sources"])
        for name, info in libraries
    }
    return Setup(units, tuple(modules), tuple(optional))


def read_units(setup: Setup | None = None) -> list[Unit]:
    """Sources of the core, the kernel tables and the self-test, with the flags of setup.py."""
    libraries = (setup or read_setup()).libraries
    core_flags = libraries["edgeh2o_core"][0].flags
    more = sorted(ROOT.glob(f"{SELFTEST}/*.cc"))
    more_units = [Unit(str(path.relative_to(ROOT)), core_flags) for path in more]
    return [unit for units in libraries.values() for unit in units] + more_units


def joined_sources(source: str) -> list[str]:
    """The files that a source of setup.py is made of: those that it includes, or itself."""
    if not source.startswith("build/joined/"):
        return [source]
    lines = (ROOT / source).read_text("ascii").splitlines()
    return [line.removeprefix('#include "../../').removesuffix('"') for line in lines]


def is_current(output: Path, dependencies: Iterable[Path]) -> bool:
    if not output.exists():
        return False
    built = output.stat().st_mtime
    return all(path.exists() and path.stat().st_mtime <= built for path in dependencies)


def read_dependencies(depfile: Path) -> list[Path]:
    """Files listed in a make rule that the compiler wrote (-MMD)."""
    if not depfile.exists():
        return [depfile]
    _, _, files = depfile.read_text().replace("\\\n", " ").partition(":")
    return [ROOT / name for name in files.split()]


def compile_unit(unit: Unit, build_dir: Path, toolchain: Toolchain | None = None) -> Path:
    """Object file of the unit, compiled again only if a file that it includes has changed."""
    output = build_dir / Path(unit.source.replace("/", "_")).with_suffix(".o")
    depfile = output.with_suffix(".d")
    if not is_current(output, [*read_dependencies(depfile), ROOT / "setup.py"]):
        toolchain = toolchain or Toolchain()
        command = [*toolchain.compiler, *toolchain.flags_of(unit), "-Icpp", "-I."]
        command += ["-MMD", "-MF", str(depfile)]
        run_compiler([*command, "-c", unit.source, "-o", str(output)])
    return output


def run_compiler(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise CheckFailedError(f"{' '.join(command)}\n{result.stderr}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)


def compile_units(units: Iterable[Unit], build_dir: Path, toolchain: Toolchain) -> list[Path]:
    """Their objects, in their order; all compiled anew if the toolchain is another than before.

    They are compiled side by side, the tables of kernels first: each takes as long as all else.
    """
    stamp = build_dir / "toolchain.txt"
    if not stamp.exists() or stamp.read_text() != repr(toolchain):
        shutil.rmtree(build_dir, ignore_errors=True)
        build_dir.mkdir(parents=True)
        stamp.write_text(repr(toolchain))
    given = list(units)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        in_turn = sorted(given, key=lambda unit: not unit.source.startswith("cpp/isa/"))
        jobs = {unit: pool.submit(compile_unit, unit, build_dir, toolchain) for unit in in_turn}
        return [jobs[unit].result() for unit in given]


def link(objects: Sequence[Path], output: Path, toolchain: Toolchain, *options: str) -> Path:
    if not is_current(output, objects):
        command = [*toolchain.compiler, *toolchain.flags, *map(str, objects), *options]
        command += toolchain.libraries
        run_compiler([*command, "-o", str(output)])
    return output


def build_selftest(build_dir: Path, toolchain: Toolchain) -> Path:
    """The program linked from all objects, so that an undefined symbol of the core is an error."""
    objects = compile_units(read_units(), build_dir, toolchain)
    return link(objects, build_dir / "kernel_selftest", toolchain, "-fopenmp")


def build_host_device(build_dir: Path, toolchain: Toolchain) -> Path:
    """The driver's library that runs kernels for GPUs on the CPU (cpp/cuda/host)."""
    units = [Unit(str(path.relative_to(ROOT)), host_library.FLAGS) for path in host_library.SOURCES]
    objects = compile_units(units, build_dir, toolchain)
    return link(objects, build_dir / "libcuda.so", toolchain, "-shared")


def emulate(
    processor: str, command: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    own = ("EDGEH2O_ISA", "EDGEH2O_LIBCUDA")
    env = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [EMULATOR, "-L", SYSROOT, "-cpu", processor, *command],
        env=env | variables,
        capture_output=True,
        text=True,
    )


def check_processor(program: Path, processor: Processor) -> None:
    listed = emulate(processor.name, [str(program), "--list"])
    expected = [*processor.tables, f"active: {processor.tables[-1]}"]
    if listed.returncode != 0 or listed.stdout.split("\n")[:-1] != expected:
        raise CheckFailedError(
            f"{processor.name}: expected {expected}, got {listed.stdout!r} {listed.stderr}"
        )
    checked = emulate(processor.name, [str(program), *processor.checked])
    print(f"{processor.name}:\n{checked.stdout}", end="")
    if checked.returncode != 0:
        raise CheckFailedError(f"{processor.name}: kernels differ {checked.stderr}")


def check_forced_isa(program: Path) -> None:
    """A table that the processor cannot run is refused by name, and a weaker one is accepted."""
    refused = emulate("cortex-a72", [str(program), "--list"], EDGEH2O_ISA="neon_dotprod")
    message = "ISA 'neon_dotprod' is not available on this processor; available: scalar, neon"
    if refused.returncode != 2 or message not in refused.stderr:
        raise CheckFailedError(f"neon_dotprod on cortex-a72 was not refused: {refused}")
    forced = emulate("cortex-a76", [str(program), "--list"], EDGEH2O_ISA="neon")
    if "active: neon\n" not in forced.stdout:
        raise CheckFailedError(f"EDGEH2O_ISA=neon on cortex-a76 was not followed: {forced}")


def check_device(program: Path, host_device: Path) -> None:
    """No driver is an error of a line; the loader and the packed weights serve the host device."""
    command = [str(program), "--device"]
    refused = emulate("cortex-a76", command)
    message = "error: there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    if refused.returncode != 2 or not refused.stderr.startswith(message):
        raise CheckFailedError(f"a GPU was not refused for want of a driver: {refused}")
    checked = emulate("cortex-a76", command, EDGEH2O_LIBCUDA=str(host_device))
    if checked.returncode != 0:
        raise CheckFailedError(f"products of the host device differ: {checked}")
    print(f"no driver: {refused.stderr}{checked.stdout}", end="")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--build-only", action="store_true")
    arguments = parser.parse_args(argv)
    build_dir = (arguments.build_dir or (QUICK_BUILD if arguments.quick else BUILD)).resolve()
    if missing := find_missing():
        print(f"skipped: {', '.join(missing)} not installed", file=sys.stderr)
        return SKIPPED
    try:
        toolchain = find_toolchain(is_quick=arguments.quick)
        program = build_selftest(build_dir, toolchain)
        host_device = build_host_device(build_dir, toolchain)
        if arguments.build_only:
            return 0
        for processor in PROCESSORS:
            check_processor(program, processor)
        check_forced_isa(program)
        check_device(program, host_device)
    except CheckFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
