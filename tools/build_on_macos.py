"""What setup.py has to know of a Mac: the architecture to build for, and where libomp is."""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

# The first that runs on Apple silicon, and has all that C++17 needs of the system's library.
OLDEST_MACOS = (11, 0)
# Of Mach-O files (mach/machine.h, mach-o/loader.h, mach-o/fat.h).
CPU_TYPES = {"x86_64": 0x0100_0007, "arm64": 0x0100_000C}
THIN_MAGIC, FAT_MAGIC = 0xFEED_FACF, 0xCAFE_BABE
HOMEBREW = {"x86_64": "/usr/local/opt/libomp", "arm64": "/opt/homebrew/opt/libomp"}


class MacError(Exception):
    """The package cannot be built here; the message says why, and what to do, in a line."""


def choose_platform(host: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """The platform to build for, as ``sysconfig.get_platform`` writes it: "macosx-11.0-arm64".

    A Python for both architectures compiles for both, but the kernels are of one: the machine's, or
    that of ARCHFLAGS. Changes ``environ`` as distutils and the names of wheels need it.

    Raises:
        MacError: if ARCHFLAGS asks for several architectures.
    """
    _, version, own = host.split("-", 2)
    wanted = {*re.findall(r"-arch\s+(\S+)", environ.get("ARCHFLAGS", ""))}
    if len(wanted) > 1:
        raise MacError(
            "edgeh2o is built for one architecture at a time: set ARCHFLAGS='-arch arm64' or "
            "ARCHFLAGS='-arch x86_64'"
        )
    is_single = own in CPU_TYPES
    (target,) = wanted or {own if is_single else platform.machine()}
    if target != own:
        environ["ARCHFLAGS"] = f"-arch {target}"
    asked = environ.get("MACOSX_DEPLOYMENT_TARGET") or version
    numbers = tuple(int(number) for number in asked.split(".")[:2])
    if numbers < OLDEST_MACOS:
        asked = ".".join(map(str, OLDEST_MACOS))
        environ["MACOSX_DEPLOYMENT_TARGET"] = asked
    chosen = f"macosx-{asked}-{target}"
    if chosen != host:
        environ["_PYTHON_HOST_PLATFORM"] = chosen
    return chosen


def find_libomp(target: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder with include/omp.h and lib/libomp.dylib for "arm64" or "x86_64".

    Raises:
        MacError: if there is none, or none for ``target``.
    """
    others = []
    for prefix in _prefixes(target, environ):
        library = prefix / "lib" / "libomp.dylib"
        if not library.exists() or not (prefix / "include" / "omp.h").exists():
            continue
        if target in architectures(library):
            return prefix
        others.append(str(library))
    if others:
        raise MacError(
            f"edgeh2o needs libomp for {target}, for which this Python is, and {others[0]} is for "
            "another processor: name the folder of one for it in LIBOMP_PREFIX, or take a Python "
            "for that processor"
        )
    where = environ.get("LIBOMP_PREFIX")
    raise MacError(
        f"edgeh2o needs OpenMP, and LIBOMP_PREFIX={where} has no include/omp.h and lib/libomp.dylib"
        if where
        else "edgeh2o needs OpenMP, which Apple's compiler comes without: brew install libomp, or "
        "conda install llvm-openmp, or name the folder of one in LIBOMP_PREFIX"
    )


def _prefixes(target: str, environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("LIBOMP_PREFIX"):
        yield Path(named)
        return
    if conda := environ.get("CONDA_PREFIX"):
        yield Path(conda)
    yield Path(sys.prefix)  # conda's, without its variables
    yield Path(HOMEBREW[target])
    if brew := shutil.which("brew"):
        told = subprocess.run([brew, "--prefix", "libomp"], capture_output=True, text=True)
        if told.returncode == 0:
            yield Path(told.stdout.strip())


def architectures(library: Path) -> set[str]:
    """Those of CPU_TYPES that a Mach-O file is for; none of a file that is another."""
    with library.open("rb") as file:
        head = file.read(4096)
    kinds: tuple[int, ...] = ()
    if len(head) >= 8 and struct.unpack_from("<I", head)[0] == THIN_MAGIC:
        kinds = struct.unpack_from("<I", head, 4)
    elif len(head) >= 8 and struct.unpack_from(">I", head)[0] == FAT_MAGIC:
        (count,) = struct.unpack_from(">I", head, 4)
        starts = range(8, min(8 + 20 * count, len(head) - 20 + 1), 20)
        kinds = tuple(struct.unpack_from(">I", head, start)[0] for start in starts)
    return {name for name, number in CPU_TYPES.items() if number in kinds}


def openmp_flags(prefix: Path) -> tuple[list[str], list[str]]:
    """Flags to compile and to link with libomp. Apple's driver refuses -fopenmp itself."""
    compile_flags = ["-Xpreprocessor", "-fopenmp", f"-I{prefix / 'include'}"]
    library = prefix / "lib"
    # conda's is found by the path of whoever needs it.
    return compile_flags, [f"-L{library}", "-lomp", f"-Wl,-rpath,{library}"]
