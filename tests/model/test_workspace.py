"""Memory of activations, which prompts and generated tokens take in turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory

from .model_pair import load_pair, prefill, random_tokens, relative_error

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


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "plamo2", "n_ssd_heads": 2},
        {"architecture": "mamba", "n_scan_channels": 32, "scan_step_rank": 4096},
        {"architecture": "qwen4exp", "stream_rank": 4096, "index_block_tokens": 0},
        {"architecture": "rwkv6", "wkv_shift_rank": 1024, "tied": False},
        {"architecture": "rwkv6qwen2", "wkv_shift_rank": 1024, "tied": False},
        {"architecture": "rwkv7", "wkv_gate_rank": 4096, "tied": False},
    ],
    ids=lambda options: options["architecture"],
)
def test_a_vector_between_products_may_be_wider_than_all_else(
    tiny_model: TinyModelFactory, options: dict[str, Any]
) -> None:
    """What is packed for the second product has room: it was written beyond the end."""
    shape = {"model_dim": 32, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 32}
    pair = load_pair(tiny_model, **{**shape, "tensor_type": "Q8_0", **options})
    tokens = random_tokens(100)
    logits = prefill(pair.session(_core.dense_policy()), tokens)
    exact = pair.reference.start(DenseLayer).prefill(tokens)
    rounding_error = relative_error(pair.as_computed(DenseLayer).prefill(tokens), exact)
    assert relative_error(logits, exact) < 1.3 * rounding_error
