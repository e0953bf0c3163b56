"""What tests against llama.cpp's recorded log-probabilities share (tests/golden)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent.parent / "golden"
# llama.cpp saves log-probabilities in steps of 16 / 65,535 nats at most.
TOLERANCE = 2e-4
# Its GELU goes through a table of half-precision numbers.
TABLE_TOLERANCE = 4e-3
WITH_GELU = (
    *("starcoder2", "phi2", "phi2_fused", "gptneox", "gptneox_sequential"),
    *("falcon", "falcon_two_norms", "codeshell", "codeshell_fused", "gpt2", "starcoder"),
    *("spark2_5", "spark2_5_fused", "bloom", "bloom_untied"),
    *("mpt", "mpt_biases", "mpt_table"),
)


def tolerance_of(case: str) -> float:
    # Of a layer; errors of the 25 layers of gemma3n add up.
    n_gelus = {"gemma3n": 6, "gemma3n_wide": 2, "gemma4": 2, "spark2_5": 2}.get(case, 1)
    has_table = case in WITH_GELU or case.startswith("gemma")
    return n_gelus * TABLE_TOLERANCE if has_table else TOLERANCE


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
