"""Memory of activations, which prompts and generated tokens take in turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.tiny_models import TinyModelFactory

from .model_pair import load_pair, random_tokens

N_PROMPT = 8192


def _resident_bytes() -> int:
    n_pages = Path("/proc/self/statm").read_text().split()[1]
    return int(n_pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels may keep pages given back")
def test_the_first_generated_token_gives_back_the_memory_of_a_long_prompt(
    tiny_model: TinyModelFactory,
) -> None:
    core = load_pair(tiny_model).core
    policy = _core.headwise_policy([64] * 4, decode_from=0, decode_budgets=[4] * 4)
    sizes: dict[str, Any] = {"max_context": N_PROMPT + 4, "batch_size": N_PROMPT}
    session = _core.Sequence(core, policy, chunk_size=1024, **sizes)
    tokens, runs = random_tokens(N_PROMPT), []
    for _ in range(2):
        session.reset()
        logits = [session.prefill(tokens, is_last=True)]
        before = _resident_bytes()
        logits += [session.decode(token) for token in (5, 6)]
        n_given_back = before - _resident_bytes()
        assert n_given_back > session.memory_bytes["activations"] / 4
        runs.append(np.stack(logits))
    np.testing.assert_array_equal(*runs)
