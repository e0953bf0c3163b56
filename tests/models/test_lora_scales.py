"""What adapters count is each sequence's own: it gets what it gets alone, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.lora_config import LoraAdapter
from edgeh2o.runners.native import NativeModelFile
from tests.model.golden_cases import options_of
from tests.models.lora_files import matrices_of, random_pairs, write_adapter
from tests.tiny_models import TinyModelFactory

# Every kind of layer whose products rows of several sequences share.
CASES = ["llama", "qwen2moe", "qwen35", "lfm2", "jamba", "granitehybrid", "minicpm3", "gemma3n"]
SIZES = {"max_context": 96, "batch_size": 64, "chunk_size": 32, "cache_type": "f32"}
TOKENS = np.random.default_rng(5).integers(3, 90, 60).astype(np.int32)
# Alike ones side by side and apart, none at all in between, and others than 1.
SCALES = [(1, 0), (0, 0), (0, 1), (0.5, -2), (1, 0), (1, 1), (0, 0.25), (0, 0)]


def write_adapters(model: Path, folder: Path, architecture: str = "llama") -> list[Path]:
    """Two, of ranks 5 and 3, which share every other matrix."""
    names = matrices_of(model)
    pairs = [random_pairs(model, names), random_pairs(model, dict.fromkeys(names[::2], 3), seed=1)]
    files = [folder / "one.gguf", folder / "two.gguf"]
    for file, each in zip(files, pairs, strict=True):
        write_adapter(file, each, architecture=architecture)
    return files


def load(model: Path, *adapters: Path, scale: float = 1.0) -> _core.Model:
    lora = tuple(LoraAdapter(str(path), scale) for path in adapters)
    with NativeModelFile(model, lora=lora) as file:
        return file.load()._core_model


def start(
    core: _core.Model,
    scales: Sequence[float] | None = None,
    workspace: _core.Workspace | None = None,
) -> _core.Sequence:
    return _core.Sequence(
        core, _core.h2o_policy(12, 4), workspace=workspace, adapter_scales=scales, **SIZES
    )


def run(sequence: _core.Sequence, shift: int = 0) -> np.ndarray:
    """float32 [5, vocab]: of the end of a prompt, of two tokens behind it, and of two together."""
    tokens = np.roll(TOKENS, shift)
    prompt = sequence.prefill(tokens[:40], is_last=True)
    rows = [sequence.decode(int(token)) for token in tokens[40:42]]
    return np.stack([prompt, *rows, *sequence.decode_batch(tokens[42:44])])


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_one_call_have_their_own(
    tiny_model: TinyModelFactory, tmp_path: Path, case: str
) -> None:
    options = options_of(case)
    model = tiny_model(**options)
    architecture = str(options.get("architecture", "llama"))
    core = load(model, *write_adapters(model, tmp_path, architecture))
    _compare(core, SCALES)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q6_K", "F16"])
def test_many_sequences_beside_quantised_weights(
    tiny_model: TinyModelFactory, tmp_path: Path, tensor_type: str
) -> None:
    """More rows than matrix-vector kernels take."""
    sizes = {"model_dim": 256, "head_dim": 64, "ffn_dim": 512}
    model = tiny_model(**options_of("llama") | {**sizes, "tensor_type": tensor_type})
    core = load(model, *write_adapters(model, tmp_path))
    _compare(core, SCALES * 3)


def _compare(core: _core.Model, all_scales: Sequence[tuple[float, float]]) -> None:
    alone = [run(start(core, scales), i) for i, scales in enumerate(all_scales)]
    workspace = _core.Workspace(core, 2)
    together = [start(core, scales, workspace) for scales in all_scales]
    for i, (sequence, expected) in enumerate(zip(together, alone, strict=True)):
        logits = sequence.prefill(np.roll(TOKENS, i)[:40], is_last=True)
        np.testing.assert_array_equal(logits, expected[0])
    for first, end in [(0, 1), (1, 2), (2, 4)]:
        steps = [
            (sequence, np.roll(TOKENS, i)[40 + first : 40 + end], None)
            for i, sequence in enumerate(together)
        ]
        for logits, expected in zip(workspace.forward(steps), alone, strict=True):
            np.testing.assert_array_equal(logits, expected[1 + first : 1 + end])


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_one_of_scale_zero_is_not_there(
    tiny_model: TinyModelFactory, tmp_path: Path, tensor_type: str
) -> None:
    """Whatever else is loaded: a sequence has the bits of a model with those that count in it."""
    sizes = {"model_dim": 256, "head_dim": 64, "ffn_dim": 512}
    model = tiny_model(**options_of("llama") | {**sizes, "tensor_type": tensor_type})
    one, two = write_adapters(model, tmp_path)
    core = load(model, one, two, scale=0.5)
    bare = run(start(load(model)))
    np.testing.assert_array_equal(run(start(core, (0, 0))), bare)
    np.testing.assert_array_equal(run(start(core, (0, -0.0))), bare)
    np.testing.assert_array_equal(run(start(core, (1, 0))), run(start(load(model, one))))
    np.testing.assert_array_equal(run(start(core, (0, 1))), run(start(load(model, two))))
    np.testing.assert_array_equal(run(start(core)), run(start(core, (0.5, 0.5))))
    assert np.abs(run(start(core)) - bare).max() > 0.05


def test_a_copy_has_the_adapters_of_what_it_is_of(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model = tiny_model(**options_of("llama"))
    core = load(model, *write_adapters(model, tmp_path))
    read = start(core, (1, 0))
    read.prefill(TOKENS[:32], is_last=False)
    read.mark()
    for scales in [(0, 1), (0, 0), (0.5, 0)]:
        with pytest.raises(ValueError, match="read with other adapters"):
            start(core, scales).copy_from(read, 32)
    copy = start(core, (1, 0))
    copy.copy_from(read, 32)
    expected = read.prefill(TOKENS[32:40], is_last=True)
    np.testing.assert_array_equal(copy.prefill(TOKENS[32:40], is_last=True), expected)


@pytest.mark.parametrize("scales", [(), (1,), (1, 0, 0)])
def test_scales_of_other_adapters(
    tiny_model: TinyModelFactory, tmp_path: Path, scales: tuple[float, ...]
) -> None:
    model = tiny_model(**options_of("llama"))
    core = load(model, *write_adapters(model, tmp_path))
    with pytest.raises(ValueError, match=f"there are {len(scales)} scales for 2 adapters"):
        start(core, scales)


def test_updates_that_the_configuration_does_not_name(tiny_model: TinyModelFactory) -> None:
    model = tiny_model(**options_of("llama"))
    a, b = np.ones((2, 64), np.float32).tobytes(), np.ones((64, 2), np.float32).tobytes()
    with pytest.raises(ValueError, match="of adapter 0 of 0"):
        load(model).add_update("blk.0.attn_q.weight", 0, 2, a, "F32", b, "F32")
