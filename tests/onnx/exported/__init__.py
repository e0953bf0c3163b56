"""Tiny decoders as others export them, made by tools/make_onnx_exports.py, and their prompt."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent
VOCABULARY = 320
N_TOKENS = 40
WINDOW = 12  # of the models that have one


def read_tokens() -> NDArray[np.int32]:
    """A prompt, longer than the windows of the models."""
    return np.random.default_rng(0).integers(3, 300, N_TOKENS).astype(np.int32)


def unpack(name: str, folder: Path) -> tuple[Path, Any]:
    """An export with its tokenizer, and the logits that the maker expects, or None."""
    shutil.copytree(ROOT / "tokenizer", folder)
    with zipfile.ZipFile(ROOT / f"{name}.zip") as source:
        source.extractall(folder)
    logits = folder / "expected.npy"
    return folder, np.load(logits) if logits.exists() else None
