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
# saves.
OPTIMISED = ("-O2",)
SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++").split()[-1]) or shutil.which("g++")


def build(output: str, sources: list[Path], *flags: str) -> Path:
    """Compiles sources into build/cuda_host, unless that was done; the path of the result."""
    digest = hashlib.sha256(repr((FLAGS, WARNINGS, flags)).encode())
    shared = ROOT / "cpp/base/half.h"
    for path in [*sorted((ROOT / "cpp/cuda").rglob("*")), shared, *sources]:
        if path.is_file():
            digest.update(path.read_bytes())
    folder = ROOT / "build" / "cuda_host" / digest.hexdigest()[:16]
    target = folder / output
    if not target.exists():
        program = compiler()
        assert program is not None
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{output}.{os.getpid()}"
        command = [program, *FLAGS, *WARNINGS, *flags, *map(str, sources), "-o", str(part)]
        subprocess.run(command, cwd=ROOT, check=True)
        part.replace(target)  # tests may run side by side
    return target


def build_driver(*, sanitized: bool = False) -> Path:
    """The host device as a library."""
    flags = ("-shared", *(SANITIZERS if sanitized else OPTIMISED))
    return build("libcuda_sanitized.so" if sanitized else "libcuda.so", SOURCES, *flags)


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
