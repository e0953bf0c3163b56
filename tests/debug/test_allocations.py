"""Prefill and decode allocate nothing. Needs a debug build (EDGEH2O_DEBUG=1), which counts."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import VOCAB_SIZE, load_pair
from tests.tiny_models import TinyModelFactory

POLICIES = {
    "dense": _core.dense_policy,
    "h2o": lambda: _core.h2o_policy(12, 20),
    "h2o with a tail": lambda: _core.h2o_policy(12, 20, tail=100),
    "headwise": lambda: _core.headwise_policy([None, 8, 16, 200], page_size=16),
    "ruvllm": lambda: _core.ruvllm_policy(window=20, block_size=8),
    "headwise with recall": lambda: _core.headwise_policy([None] * 4, page_size=16, max_past=96),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tensor_type", ["Q4_0", "F16"])
def test_calls_allocate_nothing(
    tiny_model: TinyModelFactory, policy: str, tensor_type: str
) -> None:
    check_calls(load_pair(tiny_model, tensor_type=tensor_type).core, POLICIES[policy]())


@pytest.mark.parametrize("architecture", ["deepseek2", "deepseek32"])
def test_latent_attention_allocates_nothing(
    tiny_model: TinyModelFactory, architecture: str
) -> None:
    shape = {"model_dim": 64, "n_heads": 4, "ffn_dim": 32}
    pair = load_pair(tiny_model, architecture=architecture, **shape)
    check_calls(pair.core, _core.dense_policy())


def test_mixed_streams_and_chosen_blocks_allocate_nothing(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, architecture="qwen4exp", n_layers=4, tensor_type="Q4_0")
    check_calls(pair.core, _core.dense_policy())


def test_a_layer_that_guesses_ahead_allocates_nothing(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(architecture="qwen35", tensor_type="Q4_0", n_layers=2, n_drafting_layers=1)
    with NativeModelFile(path) as file:
        layer = file.open_drafting_layer()
        model = file.load()
        own = model.load_drafting_layer(layer)
    main, drafts = (start(each._core_model, _core.dense_policy()) for each in (model, own))
    main.keeps_hidden = drafts.keeps_hidden = True
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, 256).astype(np.int32)
    main.prefill(tokens, is_last=True)
    assert main.last_call_allocations == 0
    drafts.prefill(tokens, is_last=False, hidden=main.hidden)
    assert drafts.last_call_allocations == 0
    drafts.decode(5, main.hidden[-1:])
    main.decode(5)
    assert main.last_call_allocations == drafts.last_call_allocations == 0


def start(model: _core.Model, policy: _core.SparsePolicy) -> _core.Sequence:
    session = _core.Sequence(
        model,
        policy,
        max_context=640,
        batch_size=256,
        chunk_size=64,
        checked_rows=16,
        error_limit=1e-3,
    )
    if session.last_call_allocations is None:
        pytest.skip("this is a release build: EDGEH2O_DEBUG=1 makes one that counts allocations")
    return session


def check_calls(model: _core.Model, policy: _core.SparsePolicy) -> None:
    session = start(model, policy)
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, 500).astype(np.int32)
    for _ in range(2):
        session.reset()
        session.prefill(tokens[:256], is_last=False)
        assert session.last_call_allocations == 0
        session.prefill(tokens[256:], is_last=True)
        assert session.last_call_allocations == 0
        for token in range(3):
            session.decode(token)
            assert session.last_call_allocations == 0
