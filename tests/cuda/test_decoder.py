"""Whole tiny models on the host device: the tokens and logits of the CPU's decoder."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from edgeh2o import LLM, PrefillConfig, SamplingParams, UsageError, _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.models.spec import registered_architectures
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
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.reference.headwise import HeadwiseLayer
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import TENSOR_TYPES

# What tiny models of an architecture are made with; every architecture that is registered runs.
ARCHITECTURES: dict[str, dict[str, object]] = {
    **{name: {} for name in registered_architectures()},
    "phi3": {"rotary_dim": 12},
    "exaone4": {"n_layers": 4, "sliding_window": 20},
    "glm4": {"rotary_dim": 8},
    "smollm3": {"n_layers": 4},
    "olmo2": {"tied": False},
    "gemma2": {"sliding_window": 20},
    "gemma3": {
        "n_layers": 3,
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "rope_base": 1e6,
    },
    "gemma4": {
        **{"n_layers": 6, "sliding_window": 20, "n_shared_kv": 3, "token_input_dim": 32},
        **{"head_dim": 32, "head_dim_sliding": 16, "ffn_dim": (96, 96, 96, 128, 128, 128)},
    },
    "gpt-oss": {"n_layers": 3, "sliding_window": 20},
    "granitemoe": {"shared_ffn_dim": 80},
    "mistral3": {"original_context": 15},
    "qwen2moe": {"shared_ffn_dim": 160},
}
VARIANTS: dict[str, dict[str, object]] = {
    "llama-biases": {"biases": True, "tied": False},
    "llama-yarn": {"rope_scaling": "yarn"},
    "mistral": {"sliding_window": 20},
    "gemma4-plain": {"architecture": "gemma4", "n_layers": 3, "sliding_window": 20},
    "unequal": {
        "n_layers": 3,
        "n_heads": (4, 2, 4),
        "n_kv_heads": (2, 1, 4),
        "ffn_dim": (96, 64, 128),
    },
}
MODELS = {name: {"architecture": name, **more} for name, more in ARCHITECTURES.items()} | VARIANTS
# Architectures that the kernels for GPUs lack something of, and what the refusal says.
REFUSED = dict.fromkeys(
    ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next"), "layers without attention"
) | dict.fromkeys(("deepseek2", "minicpm3"), "multi-head latent attention")
REFUSED |= dict.fromkeys(
    ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"), "layers of Mamba-2"
)
SHAPE = SessionShape(max_context=320, batch_size=64, chunk_size=32, cache_type="f16", all_rows=True)
pytestmark = pytest.mark.usefixtures("host_device")


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


@pytest.mark.parametrize("name", MODELS)
def test_architectures(tiny_model: TinyModelFactory, name: str) -> None:
    """Every one that is registered, in two calls: the tokens of the CPU, or a refusal by name."""
    path = tiny_model(**{**SMALL, **MODELS[name]})
    if name in REFUSED:
        with pytest.raises(UsageError, match=rf"{REFUSED[name]}.*--device cpu"):
            open_model(path, open_device(0))
        return
    prompt = random_tokens(35)
    shape = {"batch_size": 32, "chunk_size": 16, "all_rows": False}
    expected, tokens = greedy(path, prompt, 4, device=False, **shape)
    logits, same = greedy(path, prompt, 4, device=True, **shape)
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


def write_clear_router(path: Path) -> None:
    """Changes a file so that experts are chosen by the sign of one product, by a wide margin."""
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(".ffn_gate_inp.weight"):
            weights = tensor.data
            steps = np.array([3, 2, 0.5, -0.5, -2, -3], np.float32)
            weights[:] = steps[:, None] * weights[0]


@pytest.mark.parametrize("tensor_type", ["Q4_K", "Q6_K"])
def test_experts_of_rounded_scales_with_a_clear_router(
    tiny_model: TinyModelFactory, tmp_path: Path, tensor_type: str
) -> None:
    """Scales of two levels are rounded on the device, which may turn a near tie of experts.

    Where there is none, logits are those of the CPU within what 8-bit activations differ by, and
    as near to those of float64.
    """
    sizes = {**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64}
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model(**sizes, architecture="qwen3moe", tensor_type=tensor_type), path)
    write_clear_router(path)
    prompt = random_tokens(12)
    rows = []
    for place in (None, open_device(0)):
        with open_model(path, place) as file:
            runner = file.load().start_session(DenseConfig(), SHAPE)
        runner.prefill(prompt, is_last=True)
        of_prompt = np.array(runner.row_logits(0, len(prompt)))
        decoded = [np.array(runner.decode(token)) for token in (9, 99)]
        rows.append(np.concatenate((of_prompt, decoded)))
    errors = [relative_error(row, other) for row, other in zip(rows[1], rows[0], strict=True)]
    assert max(errors) < 0.03
    exact = ReferenceDecoder.from_gguf(path).start(DenseLayer).prefill(prompt)
    cpu, device = (relative_error(each[: len(prompt)], exact) for each in rows)
    assert device < 1.1 * cpu


def test_experts_of_mxfp4(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**{**SMALL, **MODELS["gpt-oss"]}, tensor_type="MXFP4")
    prompt = random_tokens(12)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_K"])
def test_inputs_per_token_of_quantised_weights(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    """From a table in parts."""
    monkeypatch.setattr("edgeh2o.models.hyperparameters.TOKEN_INPUT_ROWS", 100)
    more = {"model_dim": 256, "ffn_dim": 256, "head_dim": 64, "head_dim_sliding": 64}
    more |= {"n_layers": 4, "n_shared_kv": 1, "token_input_dim": 256}
    path = tiny_model(**{**SMALL, **MODELS["gemma4"], **more}, tensor_type=tensor_type)
    prompt = random_tokens(12)
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
    for cache_type, n_tokens in (("f16", 140), ("f32", 20), ("f32/f16", 20)):
        prompt = random_tokens(n_tokens)
        expected, tokens = greedy(path, prompt, 4, device=False, cache_type=cache_type)
        logits, same = greedy(path, prompt, 4, device=True, cache_type=cache_type)
        assert same == tokens
        assert relative_error(logits, expected) < 2e-4


@pytest.mark.parametrize("cache_type", ["q8_0", "q8_0/f16"])
def test_caches_in_8_bits(tiny_model: TinyModelFactory, cache_type: str) -> None:
    """Of prompts and tokens; a saved prompt goes on, on either device."""
    path, prompt = tiny_model(**{**SMALL, "head_dim": 32}), random_tokens(40)
    runners = []
    for device in (None, open_device(0)):
        with open_model(path, device) as file:
            model = file.load()
        sizes = replace(SHAPE, cache_type=cache_type)
        runners.append([model.start_session(DenseConfig(), sizes) for _ in range(2)])
    logits = []
    for runner, _ in runners:
        first = np.array(runner.prefill(prompt, is_last=True))
        logits.append(np.stack([first, *(np.array(runner.decode(token)) for token in (7, 8))]))
    # A value at the middle between two steps may be rounded either way.
    assert relative_error(logits[1], logits[0]) < 2e-3
    for (saved, _), (_, restored) in (runners, runners[::-1]):
        RunnerState.of(saved).restore(restored)
        for rows, copy in zip(saved.cached_rows(), restored.cached_rows(), strict=True):
            copy[:] = rows
        answers = [np.array(each.decode(9)) for each in (saved, restored)]
        assert relative_error(answers[1], answers[0]) < 2e-3


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


def test_two_models_share_a_device(tiny_model: TinyModelFactory) -> None:
    """Each has a stream of its own; threads of both call at once."""
    path, prompt = tiny_model(**SMALL), random_tokens(20)
    _, expected = greedy(path, prompt, 3, device=False)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(greedy, path, prompt, 3, device=True) for _ in range(2)]
        assert [run.result(timeout=120)[1] for run in runs] == [expected] * 2


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
    with pytest.raises(UsageError, match=r"errors of the attention are not measured on a GPU"):
        LLM(tiny_model(**SMALL), device="cuda", prefill=PrefillConfig(max_error=4.5))
    other = tiny_model(**{**SMALL, "n_heads": 34, "head_dim": 8})
    with pytest.raises(UsageError, match=r"17 query heads per KV head.*--device cpu"):
        LLM(other, device="cuda", attention="dense")


def check_rule(
    tiny_model: TinyModelFactory,
    make_policy: Callable[[], _core.SparsePolicy],
    tokens: NDArray[np.int32],
    lengths: list[int],
    model_options: Mapping[str, object] = SMALL,
) -> None:
    """A prompt in calls of these lengths, then three tokens: positions, pairs and logits."""
    with open_model(tiny_model(**model_options), open_device(0)) as file:
        on_device = file.load()._core_model
    on_cpu = load_pair(tiny_model, **model_options).core
    sizes = {"max_context": MAX_CONTEXT, "chunk_size": CHUNK_SIZE, "all_rows": True}
    results = []
    n_layers = model_options["n_layers"]
    assert isinstance(n_layers, int)
    for make, model in ((_core.Sequence, on_cpu), (_core.DeviceSequence, on_device)):
        policy = make_policy()
        session = make(model, policy, batch_size=MAX_CONTEXT, **sizes)
        rows = prefill(session, *split(tokens, lengths))
        decoded = [np.array(session.decode(int(token))) for token in tokens[:3]]
        chosen = [policy.memory_set(layer, head) for layer in range(n_layers) for head in range(2)]
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
    lengths = [64, 1, 39] if options else [100, 1, 67]
    check_rule(tiny_model, lambda: _core.h2o_policy(LOCAL, HEAVY, **options), tokens, lengths)


@pytest.mark.parametrize("name", ["gemma4", "hunyuan-dense", "mistral3"])
def test_h2o_in_layers_of_every_kind(tiny_model: TinyModelFactory, name: str) -> None:
    """Keys and values of another layer, norms behind the rotation, queries scaled by position."""
    options = {**SMALL, **MODELS[name]}
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
