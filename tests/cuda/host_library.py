"""Builds the host device: a libcuda.so.1 that runs the kernels on the CPU (cpp/cuda/host)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "cpp/cuda/host").glob("*.cc"))
# A tenth of the time of a kernel went into asking where the variable of the thread lies.
FLAGS = (
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ftls-model=initial-exec",
    "-ffp-contract=off",
    "-Icpp",
)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
# A model that the host device is quick with.
SMALL = {
    "n_layers": 2,
    "model_dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 96,
}
# At -O2 models take a third less time than at -O1; sanitizers make that compile for longer than it
# saves, and what -O1 has over -Og too.
OPTIMISED = ("-O2",)
SANITIZERS = ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++").split()[-1]) or shutil.which("g++")


def build(output: str, sources: list[Path], *flags: str, shared: bool = False) -> Path:
    """Links sources into build/cuda_host, unless that was done; the path of the result.

    Objects stay there for others that are built with the same flags.
    """
    digest = hashlib.sha256(repr((FLAGS, WARNINGS, flags)).encode())
    included = ROOT / "cpp/base/half.h"
    for path in [*sorted((ROOT / "cpp/cuda").rglob("*")), included]:
        if path.is_file():
            digest.update(path.read_bytes())
    folder = ROOT / "build" / "cuda_host" / digest.hexdigest()[:16]
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = folder / own / output
    if not target.exists():
        (folder / own).mkdir(parents=True, exist_ok=True)
        objects = []
        for source in sources:
            name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
            objects.append(_make(folder / f"{name}.o", "-c", str(source), *flags))
        _make(target, *map(str, objects), *flags, *(("-shared",) if shared else ()))
    return target


def _make(target: Path, *arguments: str) -> Path:
    """What the compiler makes, unless it is there: tests may run side by side."""
    if not target.exists():
        program = compiler()
        assert program is not None
        part = target.with_name(f"{target.name}.{os.getpid()}")
        command = [program, *FLAGS, *WARNINGS, *arguments, "-o", str(part)]
        subprocess.run(command, cwd=ROOT, check=True)
        part.replace(target)
    return target


def build_driver(*, sanitized: bool = False) -> Path:
    """The host device as a library."""
    output, flags = ("libcuda_sanitized.so", SANITIZERS) if sanitized else ("libcuda.so", OPTIMISED)
    return build(output, SOURCES, *flags, shared=True)


def sanitizer_environment() -> dict[str, str]:
    """What a Python needs in its environment to load the sanitized library."""
    program = compiler()
    assert program is not None
    libraries = [
        subprocess.run(
            [program, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
