"""Sparse rules on the host device: the positions and logits of the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import _core
from tests.cuda.host_library import SMALL
from tests.cuda.models.architectures import MODELS
from tests.cuda.models.rules import Loudest, check_rule
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    decisive_prompt,
    load_pair,
    random_tokens,
)
from tests.reference.headwise import HeadwiseLayer
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "mean", "sinks": 2},
        {"score": "lift"},
        {"score": "window", "window": 8},
        {"decay": 0.5},
        {"by_values": True},
        {"tail": 20},
    ],
    ids=str,
)
def test_h2o_chooses_and_answers_as_the_cpu_does(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    pair = load_pair(tiny_model, **SMALL)
    tokens = decisive_prompt(pair, (1 if options else 2) * CHUNK_SIZE + 40)
    lengths = [64, 1, 39] if options else [100, 1, 67]
    check_rule(tiny_model, lambda: _core.h2o_policy(LOCAL, HEAVY, **options), tokens, lengths)


@pytest.mark.parametrize(
    "name", ["falcon-h1", "gemma4", "granitehybrid", "hunyuan-dense", "mistral3"]
)
def test_h2o_in_layers_of_every_kind(tiny_model: TinyModelFactory, name: str) -> None:
    """Keys and values of another layer, norms behind the rotation, queries scaled by position.

    Attention beside Mamba-2, and between layers of it.
    """
    options = {**SMALL, **MODELS[name]}
    if name == "granitehybrid":
        options |= {"n_layers": 2, "n_experts": 0, "shared_ffn_dim": 0}
    if name == "gemma4":  # two kinds of layers, and of each one that shares
        options |= {"n_layers": 4, "sliding_window_pattern": 2, "n_shared_kv": 2, "ffn_dim": 96}
    tokens = decisive_prompt(load_pair(tiny_model, **options), CHUNK_SIZE + 40)
    make_policy = functools.partial(_core.h2o_policy, LOCAL, HEAVY)
    check_rule(tiny_model, make_policy, tokens, [64, 1, 39], options)


def test_column_sums_of_one_softmax_count_its_sinks(tiny_model: TinyModelFactory) -> None:
    """Those of headwise, whose layers of full attention have sinks here."""
    options = {**SMALL, **MODELS["gpt-oss"]}
    budgets = [30] * 6

    def make_policy() -> _core.SparsePolicy:
        return _core.headwise_policy(budgets, local=6, sinks=2, page_size=16)

    check_rule(tiny_model, make_policy, random_tokens(CHUNK_SIZE + 40), [90, 14], options)


def test_ruvllm_chooses_and_answers_as_the_cpu_does(tiny_model: TinyModelFactory) -> None:
    """Landmarks of prompts and of generated tokens."""
    check_rule(
        tiny_model,
        lambda: _core.ruvllm_policy(window=20, block_size=8, globals=3),
        random_tokens(CHUNK_SIZE + 40),
        [90, 14],
    )


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_rule_in_python_chooses_and_answers_as_on_the_cpu(
    tiny_model: TinyModelFactory, name: str
) -> None:
    """Also of queries that lie behind gates, between layers that do not attend."""
    n = (2 if name == "llama" else 1) * CHUNK_SIZE + 9
    tokens = random_tokens(n)
    check_rule(
        tiny_model,
        lambda: _core.python_policy(Loudest(), max_synthetic=1),
        tokens,
        [n // 2 + 2, n - n // 2 - 2],
        {**SMALL, **MODELS[name], "n_layers": 2},
    )


@pytest.mark.parametrize(
    ("budgets", "options", "chunk_size"),
    [
        ((9, 60, None, 30), {}, CHUNK_SIZE),
        ((20, 33, 40, None), {"page_size": 0, "decay": 0.5}, CHUNK_SIZE),
        ((None, 24, None, None), {"max_past": 60, "tail": 20}, CHUNK_SIZE),
        ((None, None, None, None), {"max_past": 48, "page_size": 5, "local": 20}, CHUNK_SIZE),
        ((9, 60, None, 30), {}, 270),  # column sums in two parts
    ],
    ids=str,
)
def test_headwise_chooses_and_answers_as_the_cpu_does(
    tiny_model: TinyModelFactory,
    budgets: tuple[int | None, ...],
    options: dict[str, int],
    chunk_size: int,
) -> None:
    """Budgets per head, landmarks, recalled pages, a tail that reads everything."""
    options = {"local": 6, "sinks": 2, "page_size": 16, **options}
    pair = load_pair(tiny_model, **SMALL)

    def make_layers() -> Callable[[], HeadwiseLayer]:
        layers = iter((budgets[:2], budgets[2:]))
        settings = {"chunk_size": chunk_size, **options}
        return lambda **more: HeadwiseLayer(budgets=next(layers), **settings, **more)

    def is_decisive(tokens: NDArray[np.int32]) -> bool:
        run = pair.as_computed(make_layers())
        run.prefill(tokens)
        return all(c.margins.min() > 1e-4 for layer in run.layers for c in layer.chunks)

    n_chunks = 3 if chunk_size == CHUNK_SIZE else 1
    prompts = (random_tokens(n_chunks * chunk_size + 9, seed=seed) for seed in range(50))
    tokens = next(filter(is_decisive, prompts))

    def make_policy() -> _core.SparsePolicy:
        return _core.headwise_policy(list(budgets), **options)

    n = len(tokens)
    whole = "tail" in options or chunk_size > CHUNK_SIZE
    lengths = [n] if whole else [100, 1, n - 101]
    check_rule(tiny_model, make_policy, tokens, lengths, chunk_size=chunk_size)
