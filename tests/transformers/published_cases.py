"""The recorded folders: their names, files of them, and what the core makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core
from edgeh2o.runners.native import NativeModelFile

from .published import FOLDER, Published, write_published

CASES = sorted(path.stem for path in FOLDER.glob("*.npz"))
CHUNK, N_DECODED = 32, 12


def write_case(folder: Path, case: Published, tokenizer_folder: Path) -> None:
    folder.mkdir()
    write_published(folder, case.config, case.shapes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer_folder / name).read_text())


def log_probabilities(file: NativeModelFile, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of all positions: a prefill by chunks, then tokens one by one."""
    with file:
        model = file.load()._core_model
    n_prompt = len(tokens) - N_DECODED
    session = _core.Sequence(
        model,
        _core.dense_policy(),
        max_context=len(tokens),
        batch_size=len(tokens),
        chunk_size=CHUNK,
        cache_type="f32",
        all_rows=True,
    )
    session.prefill(tokens[:n_prompt], is_last=True)
    rows = [*session.row_logits(0, n_prompt)]
    rows += [np.array(session.decode(int(token))) for token in tokens[n_prompt:]]
    logits = np.array(rows, np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
