"""Reads the token ids from a session file that llama.cpp saved (``--prompt-cache``)."""

from __future__ import annotations

import struct
from pathlib import Path

from .errors import LlamaCppError

# LLAMA_SESSION_MAGIC of llama.h, then a version, then the number of tokens.
_MAGIC = 0x6767736E
_HEADER = struct.Struct("<III")


def read_saved_tokens(path: Path) -> list[int]:
    """Ids of all evaluated tokens, prompt first. Raises LlamaCppError for another kind of file."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise LlamaCppError(f"{path} is too short for a llama.cpp session")
        magic, _, n_tokens = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise LlamaCppError(f"{path} is no llama.cpp session (its magic is {magic:#x})")
        data = file.read(4 * n_tokens)
    if len(data) < 4 * n_tokens:
        raise LlamaCppError(f"{path} ends before its {n_tokens} tokens")
    return list(struct.unpack(f"<{n_tokens}i", data))
