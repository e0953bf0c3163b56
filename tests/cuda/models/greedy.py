"""Greedy tokens of a model on either device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.base import SessionShape

# Of logits, against the CPU: prompts weigh values in f16 on tensor cores, 2^-12 of an output.
LOGIT_TOLERANCE = 6e-4

SHAPE = SessionShape(max_context=320, batch_size=64, chunk_size=32, cache_type="f16", all_rows=True)


def greedy(path: Path, prompt: NDArray[np.int32], n: int, *, device: bool, **shape: object) -> list:
    """Logits of the last prompt token and of n greedy tokens after it, and these."""
    opened = open_model(path, open_device(0) if device else None)
    with opened as file:
        model = file.load()
    sizes = replace(SHAPE, **shape)
    runner = model.start_session(DenseConfig(), sizes)
    for begin in range(0, len(prompt), sizes.batch_size):
        end = min(begin + sizes.batch_size, len(prompt))
        logits = runner.prefill(prompt[begin:end], is_last=end == len(prompt))
    all_logits, tokens = [np.array(logits)], []
    for _ in range(n):
        tokens.append(int(np.argmax(all_logits[-1])))
        all_logits.append(np.array(runner.decode(tokens[-1])))
    return [np.stack(all_logits), tokens]
