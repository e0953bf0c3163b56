"""Models with latent attention on the host device: the CPU's tokens, logits, choices, sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.base import RunnerState
from edgeh2o.runners.cuda import CudaModelFile
from tests.cuda.models.greedy import SHAPE, greedy
from tests.cuda.models.rules import Loudest, check_rule
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    decisive_prompt,
    load_pair,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")
# Small, because the host device takes a second for what a GPU does in a millisecond.
SIZES = {"n_layers": 2, "model_dim": 32, "n_heads": 4, "ffn_dim": 32, "kv_rank": 24, "q_rank": 16}
SIZES |= {"nope_dim": 8, "rope_dim": 8, "value_dim": 12}
# Without experts, whose choice is one of either or.
DENSE = {**SIZES, "architecture": "deepseek2", "n_experts": 0}
GROUPS = {"n_experts": 8, "n_experts_used": 3, "n_expert_groups": 4, "n_expert_groups_used": 2}
# What tests/cuda/models/test_architectures.py has not: it makes one model of either architecture.
VARIANTS: dict[str, dict[str, object]] = {
    "lite": {"q_rank": 0, "has_softmax_gate": True, "n_shared_experts": 2},
    "groups": {**GROUPS, "n_shared_experts": 1},
    "older-layout": {"q_rank": 0, "has_matrices_per_head": False, "n_experts": 0},
    "minicpm3": {"architecture": "minicpm3", "kv_rank": 40, "n_heads": 6},
    "many-heads": {"n_experts": 0, "n_heads": 38, "n_layers": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tiny_model: TinyModelFactory, name: str) -> None:
    """Of prompts in two calls, and tokens; a cache of f32, in which roundings hide nothing."""
    path = tiny_model(**{**SIZES, "architecture": "deepseek2", **VARIANTS[name]})
    prompt = random_tokens(35)
    shape = {"batch_size": 32, "chunk_size": 16, "all_rows": False, "cache_type": "f32"}
    expected, tokens = greedy(path, prompt, 3, device=False, **shape)
    logits, same = greedy(path, prompt, 3, device=True, **shape)
    assert same == tokens
    assert relative_error(logits, expected) < 2e-5


WIDE = {"kv_rank": 64, "rope_dim": 32, "nope_dim": 32, "value_dim": 32, "q_rank": 32}


@pytest.mark.parametrize(
    ("tensor_type", "is_new"), [("Q8_0", True), ("Q8_0", False), ("Q4_0", True), ("F16", False)]
)
def test_quantised_weights(tiny_model: TinyModelFactory, tensor_type: str, is_new: bool) -> None:
    """Matrices of heads in 8 and 4 bits, of several rows and of one; keys that become floats."""
    sizes = {**DENSE, **WIDE, "ffn_dim": 64, "has_matrices_per_head": is_new}
    path = tiny_model(**sizes, tensor_type=tensor_type)
    prompt = random_tokens(20)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03
    with CudaModelFile(path, open_device(0)) as file:
        weight_bytes = file.load().weight_bytes
    # Blocks hold pieces at multiples of 256 bytes, lists of heads and vectors too.
    assert 0 <= weight_bytes - file.n_weight_bytes < 32 * 1024


def test_h2o_chooses_and_answers_as_the_cpu_does(tiny_model: TinyModelFactory) -> None:
    tokens = decisive_prompt(load_pair(tiny_model, **DENSE), CHUNK_SIZE + 16)
    make_policy = functools.partial(_core.h2o_policy, LOCAL, HEAVY)
    check_rule(tiny_model, make_policy, tokens, [64, 1, 15], DENSE)


@pytest.mark.parametrize(
    "make_policy",
    [
        # A budget per layer, for all of its heads; landmarks and recalled pages.
        lambda: _core.headwise_policy([24, None], local=6, sinks=2, page_size=16, max_past=48),
        lambda: _core.python_policy(Loudest(), max_synthetic=1),
    ],
    ids=["headwise", "python"],
)
def test_other_rules(
    tiny_model: TinyModelFactory, make_policy: Callable[[], _core.SparsePolicy]
) -> None:
    n = CHUNK_SIZE + 16
    check_rule(tiny_model, make_policy, random_tokens(n), [n // 2 + 12, n // 2 - 12], DENSE)


def start(path: Path, n: int, attention: Any, *, on_device: bool, cache_type: str) -> list[Any]:
    with open_model(path, open_device(0) if on_device else None) as file:
        model = file.load()
    sizes = replace(SHAPE, max_context=96, cache_type=cache_type, all_rows=False)
    return [model.start_session(attention, sizes) for _ in range(n)]


@pytest.mark.parametrize(("cache_type", "bound"), [("f16", 2e-4), ("q8_0", 5e-3)])
def test_a_saved_prompt_goes_on_on_either_device(
    tiny_model: TinyModelFactory, cache_type: str, bound: float
) -> None:
    """One row per token is kept, and saved; a session goes back to a mark and begins anew."""
    path, tokens = tiny_model(**DENSE), random_tokens(40)
    runners = [
        start(path, 2, DenseConfig(), on_device=on_device, cache_type=cache_type)
        for on_device in (False, True)
    ]
    logits = []
    for first, _ in runners:
        read = [np.array(first.prefill(tokens, is_last=True, stays_open=True))]
        logits.append(np.stack(read + [np.array(first.decode(token)) for token in (7, 8)]))
    # A value at the middle between two steps of q8_0 may be rounded either way.
    assert relative_error(logits[1], logits[0]) < bound
    on_cpu, on_device = (first for first, _ in runners)
    assert on_device.memory_bytes["kv_cache"] == on_cpu.memory_bytes["kv_cache"]
    assert len(on_device.cached_rows()) == 2  # of two layers
    for (saved, _), (_, restored) in (runners, runners[::-1]):
        RunnerState.of(saved).restore(restored)
        for rows, copy in zip(saved.cached_rows(), restored.cached_rows(), strict=True):
            copy[:] = rows
        answers = [np.array(each.decode(9)) for each in (saved, restored)]
        assert relative_error(answers[1], answers[0]) < bound
    on_device.rewind(on_device.find_mark(40))
    np.testing.assert_array_equal(on_device.decode(7), logits[1][1])
    on_device.reset()
    np.testing.assert_array_equal(on_device.prefill(tokens, is_last=True), logits[1][0])


def test_h2o_goes_on_from_a_saved_session(tiny_model: TinyModelFactory) -> None:
    path, tokens = tiny_model(**DENSE), random_tokens(72)
    config = H2OConfig(local=12, heavy=4)
    first, second = start(path, 2, config, on_device=True, cache_type="f16")
    first.prefill(tokens[:64], is_last=False)
    RunnerState.of(first).restore(second)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    answers = [np.array(each.prefill(tokens[64:], is_last=True)) for each in (first, second)]
    np.testing.assert_array_equal(answers[1], answers[0])
