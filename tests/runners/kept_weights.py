"""Models of tests with packed weights that are kept, and what tells how they were loaded."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModel, NativeModelFile

SHAPE = SessionShape(max_context=64, batch_size=32, chunk_size=32, cache_type="f32")
PROMPT = np.arange(2, 22, dtype=np.int32)


def load(path: Path, folder: Path | None = None) -> NativeModel:
    """Without a folder as always; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = "off" if folder is None else str(folder)
        with NativeModelFile(path, packed_weights=name) as file:
            return file.load()


def logits(model: NativeModel) -> NDArray[np.float32]:
    runner = model.start_session(DenseConfig(), SHAPE)
    first = runner.prefill(PROMPT, is_last=True)
    assert first is not None
    return np.stack([np.array(first), np.array(runner.decode(3))])


def is_mapped(model: NativeModel) -> bool:
    return model.mapped_weight_bytes > 0


def made_files(folder: Path) -> set[int]:
    """What tells the files of a folder from those that are made later."""
    return {file.stat().st_ino for file in folder.glob("*.packed")}


def kept_file(folder: Path) -> Path:
    (file,) = folder.glob("*.packed")
    return file
