"""Models of which nothing is known yet, and prompts that teach it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, PrefillConfig, SamplingParams
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.kept_profiles import MIN_PROMPT
from edgeh2o.engine import payoff
from tests.tiny_models import TinyModelFactory

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# What random weights attend to no memory set keeps: the guard must let it pass.
CHUNKS = PrefillConfig(batch_size=1024, chunk_size=256, max_error=100)


def unknown_model(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model without a table or profile, of which sparse prefill pays at every length."""
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    # However short: tests/engine/test_payoff.py has the lengths from which sparse pays.
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)
    return tiny_model(tensor_type="Q8_0", context_length=8192, n_heads=4, model_dim=128)


def load(path: Path, attention: SparseAttentionConfig | None = None) -> LLM:
    return LLM(path, attention=attention, prefill=CHUNKS)


def random_prompt(llm: LLM, n_tokens: int = MIN_PROMPT, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, llm.config.vocab_size, n_tokens).astype(np.int32)
