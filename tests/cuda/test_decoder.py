"""Whole tiny models on the host device: the tokens and logits of the CPU's decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import LLM, SamplingParams, UsageError, _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.base import RunnerState, SessionShape
from tests.cuda.host_library import SMALL
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    MAX_CONTEXT,
    decisive_prompt,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.reference.headwise import HeadwiseLayer
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import TENSOR_TYPES

MODELS = {
    "llama": {},
    "llama-biases": {"biases": True, "tied": False},
    "llama-yarn": {"rope_scaling": "yarn"},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
    "phi3": {"architecture": "phi3", "rotary_dim": 12},
    "granite": {"architecture": "granite"},
    "exaone4": {"architecture": "exaone4", "n_layers": 4, "sliding_window": 20},
    "gemma": {"architecture": "gemma"},
    "glm4": {"architecture": "glm4", "rotary_dim": 8},
    "seed_oss": {"architecture": "seed_oss"},
    "smollm3": {"architecture": "smollm3", "n_layers": 4},
    "olmo2": {"architecture": "olmo2", "tied": False},
    "mistral": {"sliding_window": 20},
    "gemma2": {"architecture": "gemma2", "sliding_window": 20},
    "gemma3": {
        "architecture": "gemma3",
        "n_layers": 3,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "rope_base": 1e6,
    },
    "qwen2moe": {"architecture": "qwen2moe", "shared_ffn_dim": 160},
    "qwen3moe": {"architecture": "qwen3moe"},
    "unequal": {
        "n_layers": 3,
        "n_heads": (4, 2, 4),
        "n_kv_heads": (2, 1, 4),
        "ffn_dim": (96, 64, 128),
    },
}  # fmt: skip
SHAPE = SessionShape(max_context=320, batch_size=64, chunk_size=32, cache_type="f16", all_rows=True)
pytestmark = pytest.mark.usefixtures("host_device")


def greedy(path: Path, prompt: NDArray[np.int32], n: int, *, device: bool, **shape: object) -> list:
    """Logits of the last prompt token and of n greedy tokens after it, and these."""
    opened = open_model(path, open_device(0) if device else None)
    with opened as file:
        model = file.load()
    runner = model.start_session(DenseConfig(), replace(SHAPE, **shape))
    for begin in range(0, len(prompt), SHAPE.batch_size):
        end = min(begin + SHAPE.batch_size, len(prompt))
        logits = runner.prefill(prompt[begin:end], is_last=end == len(prompt))
    all_logits, tokens = [np.array(logits)], []
    for _ in range(n):
        tokens.append(int(np.argmax(all_logits[-1])))
        all_logits.append(np.array(runner.decode(tokens[-1])))
    return [np.stack(all_logits), tokens]


@pytest.mark.parametrize("name", MODELS)
def test_architectures(tiny_model: TinyModelFactory, name: str) -> None:
    path = tiny_model(**{**SMALL, **MODELS[name]})
    prompt = random_tokens(35)
    expected, tokens = greedy(path, prompt, 6, device=False)
    logits, same = greedy(path, prompt, 6, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 2e-4


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0", "F16"])
def test_experts_of_quantised_weights(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    """Of a prompt of several groups, and of tokens: each goes to its own experts."""
    path = tiny_model(
        **{**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64},
        architecture="qwen3moe",
        tensor_type=tensor_type,
    )
    prompt = random_tokens(21)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_tensor_types(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    sizes = {**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64}
    path = tiny_model(**sizes, tensor_type=tensor_type)
    prompt = random_tokens(9)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    # Sums in another order show where an activation rounds to the next of 255 steps; a wrong
    # weight does more. The kernels themselves are held to 1e-6.
    assert relative_error(logits, expected) < 0.03


def test_a_long_context_in_several_ranges(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    for cache_type, n_tokens in (("f16", 270), ("f32", 20), ("f32/f16", 20)):
        prompt = random_tokens(n_tokens)
        expected, tokens = greedy(path, prompt, 4, device=False, cache_type=cache_type)
        logits, same = greedy(path, prompt, 4, device=True, cache_type=cache_type)
        assert same == tokens
        assert relative_error(logits, expected) < 2e-4


def test_logits_of_every_row(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    tokens = random_tokens(40)
    rows = []
    for device in (None, open_device(0)):
        with open_model(path, device) as file:
            runner = file.load().start_session(DenseConfig(), SHAPE)
        runner.prefill(tokens, is_last=True)
        rows.append(np.array(runner.row_logits(3, 37)))
        assert runner.pairs_computed == 40 * 41 // 2
    assert relative_error(rows[1], rows[0]) < 2e-4


def test_a_prompt_moves_to_another_session(tiny_model: TinyModelFactory) -> None:
    """Rows go to the host and back, as saved sessions and longer contexts need it."""
    path = tiny_model(**SMALL)
    tokens = random_tokens(40)
    with open_model(path, open_device(0)) as file:
        model = file.load()
    first, second = (model.start_session(DenseConfig(), SHAPE) for _ in range(2))
    first.prefill(tokens, is_last=True, stays_open=True)
    expected = np.array(first.decode(7))
    first.rewind(40)
    RunnerState.of(first).restore(second)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    np.testing.assert_array_equal(second.decode(7), expected)
    first.rewind(first.find_mark(40))
    np.testing.assert_array_equal(first.decode(7), expected)


def test_llm_answers_as_the_cpu_does(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL, tensor_type="Q8_0")
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, attention="dense", context_size=128) as llm:
            result = llm.generate(
                "the cat was on the", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            )
            answers.append(result.text)
            assert result.stats.device.startswith("cpu" if device == "cpu" else "cuda:0 (")
    assert answers[0] == answers[1]


def test_what_the_device_lacks_is_refused_by_name(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    for architecture, what in (
        ("hunyuan-dense", "normed after their rotation"),
        ("mistral3", "queries scaled by their position"),
        ("gemma4", "layers that share keys and values"),
        ("gpt-oss", "attention sinks"),
        ("lfm2", "layers without attention"),
        ("qwen35", "layers without attention"),
    ):
        other = tiny_model(**SMALL, architecture=architecture)
        with pytest.raises(UsageError, match=rf"{what}.*--device cpu"):
            LLM(other, device="cuda", attention="dense")
    with (
        pytest.raises(UsageError, match=r"q8_0.*--cache-type f16"),
        LLM(path, device="cuda", attention="dense", cache_type="q8_0") as llm,
    ):
        llm.generate("a", SamplingParams(max_tokens=1))


def check_rule(
    tiny_model: TinyModelFactory,
    make_policy: Callable[[], _core.SparsePolicy],
    tokens: NDArray[np.int32],
    lengths: list[int],
) -> None:
    """A prompt in calls of these lengths, then three tokens: positions, pairs and logits."""
    with open_model(tiny_model(**SMALL), open_device(0)) as file:
        on_device = file.load()._core_model
    on_cpu = load_pair(tiny_model, **SMALL).core
    sizes = {"max_context": MAX_CONTEXT, "chunk_size": CHUNK_SIZE, "all_rows": True}
    results = []
    for make, model in ((_core.Sequence, on_cpu), (_core.DeviceSequence, on_device)):
        policy = make_policy()
        session = make(model, policy, batch_size=MAX_CONTEXT, **sizes)
        rows = prefill(session, *split(tokens, lengths))
        decoded = [np.array(session.decode(int(token))) for token in tokens[:3]]
        chosen = [policy.memory_set(layer, head) for layer in range(2) for head in range(2)]
        results.append((np.concatenate((rows, np.stack(decoded))), chosen, session))
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert relative_error(results[1][0], results[0][0]) < 2e-4
    assert results[1][2].pairs_computed == results[0][2].pairs_computed
    assert results[1][2].pairs_dense == results[0][2].pairs_dense


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
    calls = [[64, 1, 39]] if options else [[168], [100, 1, 67]]
    for lengths in calls:
        check_rule(tiny_model, lambda: _core.h2o_policy(LOCAL, HEAVY, **options), tokens, lengths)


class Loudest:
    """Positions with large keys, seen from the chunk's first query; a mean row for the others."""

    def _choose(self, chunk: tuple[int, int], queries: Any, keys: Any) -> NDArray[np.intp]:
        assert queries.shape == (chunk[1] - chunk[0], 2, 16)
        seen = np.abs(keys.astype(np.float32) @ queries[0, 0])
        return np.sort(np.argsort(-seen, kind="stable")[:20])

    def select_memory(
        self, layer: int, kv_head: int, chunk: tuple[int, int], q: Any, k: Any, v: Any
    ) -> tuple[Any, ...]:
        rows = (part.mean(0, dtype=np.float32, keepdims=True) for part in (k, v))
        return (self._choose(chunk, q, k), *rows, np.array([np.log(chunk[0])], np.float32))

    def select_decode(
        self, layer: int, kv_head: int, chunk: tuple[int, int], q: Any, k: Any, v: Any
    ) -> NDArray[np.intp]:
        return self._choose(chunk, q, k)


def test_a_rule_in_python_chooses_and_answers_as_on_the_cpu(tiny_model: TinyModelFactory) -> None:
    tokens = random_tokens(2 * CHUNK_SIZE + 9)
    check_rule(
        tiny_model,
        lambda: _core.python_policy(Loudest(), max_synthetic=1),
        tokens,
        [70, len(tokens) - 70],
    )


@pytest.mark.parametrize(
    ("budgets", "options"),
    [
        ((9, 60, None, 30), {}),
        ((20, 33, 40, None), {"page_size": 0, "decay": 0.5}),
        ((None, 24, None, None), {"max_past": 60, "tail": 20}),
        ((None, None, None, None), {"max_past": 48, "page_size": 5, "local": 20}),
    ],
    ids=str,
)
def test_headwise_chooses_and_answers_as_the_cpu_does(
    tiny_model: TinyModelFactory, budgets: tuple[int | None, ...], options: dict[str, int]
) -> None:
    """Budgets per head, landmarks, recalled pages, a tail that reads everything."""
    options = {"local": 6, "sinks": 2, "page_size": 16, **options}
    pair = load_pair(tiny_model, **SMALL)

    def make_layers() -> Callable[[], HeadwiseLayer]:
        layers = iter((budgets[:2], budgets[2:]))
        settings = {"chunk_size": CHUNK_SIZE, **options}
        return lambda **more: HeadwiseLayer(budgets=next(layers), **settings, **more)

    def is_decisive(tokens: NDArray[np.int32]) -> bool:
        run = pair.as_computed(make_layers())
        run.prefill(tokens)
        return all(c.margins.min() > 1e-4 for layer in run.layers for c in layer.chunks)

    prompts = (random_tokens(3 * CHUNK_SIZE + 9, seed=seed) for seed in range(50))
    tokens = next(filter(is_decisive, prompts))

    def make_policy() -> _core.SparsePolicy:
        return _core.headwise_policy(list(budgets), **options)

    n = len(tokens)
    lengths = [n] if "tail" in options else [100, 1, n - 101]
    check_rule(tiny_model, make_policy, tokens, lengths)


def test_h2o_goes_on_from_a_saved_session(tiny_model: TinyModelFactory) -> None:
    with open_model(tiny_model(**SMALL), open_device(0)) as file:
        model = file.load()
    tokens = random_tokens(180)
    shape = replace(SHAPE, batch_size=64)
    config = H2OConfig(local=12, heavy=4)
    sessions = [model.start_session(config, shape) for _ in range(2)]
    first, second = sessions
    for begin in (0, 64):
        first.prefill(tokens[begin : begin + 64], is_last=False)
    RunnerState.of(first).restore(second)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    answers = [np.array(each.prefill(tokens[128:], is_last=True)) for each in sessions]
    np.testing.assert_array_equal(answers[1], answers[0])
