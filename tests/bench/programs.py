"""Stand-ins for the programs of llama.cpp."""

from __future__ import annotations

from pathlib import Path

BACKEND_LINE = "load_backend: loaded CPU backend from /opt/llama/libggml-cpu-haswell.so"


def install(folder: Path, program: str, script: str) -> None:
    """Writes a shell script in the place of a llama.cpp program."""
    path = folder / program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
