"""Loading GGUF models into the C++ decoder, and sessions behind the runner protocol."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.config import CACHE_TYPES
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.models import TensorBinding
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModel, NativeModelFile, estimate_session_bytes
from tests.tiny_models import TinyModelFactory

SHAPE = SessionShape(max_context=96, batch_size=32, chunk_size=16, cache_type="f16")
TOKENS = np.arange(3, 35, dtype=np.int32)


@pytest.fixture(scope="module")
def path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q8_0")


@pytest.fixture(scope="module")
def model(path: Path) -> NativeModel:
    with NativeModelFile(path) as file:
        return file.load()


def test_the_fingerprint_outlives_the_name_of_the_file(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    with NativeModelFile(copy) as file:
        model = file.load()
    copy.unlink()
    with NativeModelFile(path) as file:
        assert model.fingerprint == file.load().fingerprint


def test_load_reports_every_byte(path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with NativeModelFile(path) as file:
        file.load(on_bytes=lambda done, total: reports.append((done, total)))
    assert {total for _, total in reports} == {file.n_weight_bytes}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1][0] == file.n_weight_bytes


def test_model_is_ready_once_the_file_is_closed(model: NativeModel) -> None:
    assert model.weight_bytes > 0
    assert model.tokenizer.vocab_size == model.config.vocab_size
    runner = model.start_session(DenseConfig(), SHAPE)
    logits = runner.prefill(TOKENS, is_last=True)
    assert logits is not None
    assert logits.shape == (runner.vocab_size,)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("cache_type", [*CACHE_TYPES, "q8_0/f32"])
def test_estimate_is_what_a_session_allocates(model: NativeModel, cache_type: str) -> None:
    shape = replace(SHAPE, cache_type=cache_type)
    for attention in (DenseConfig(), H2OConfig(local=4, heavy=4)):
        runner = model.start_session(attention, shape)
        estimate = model.estimate_session_bytes(attention, shape)
        assert runner.memory_bytes == estimate
        assert estimate == estimate_session_bytes(model.config, attention, shape)


def test_cache_of_the_estimate_grows_with_the_context(model: NativeModel) -> None:
    double, wide = replace(SHAPE, max_context=192), replace(SHAPE, cache_type="f32")
    narrow = replace(SHAPE, cache_type="q8_0")
    base = model.estimate_session_bytes(DenseConfig(), SHAPE)["kv_cache"]
    config = model.config
    assert base >= 2 * config.n_layers * config.n_kv_heads * config.head_dim * 96 * 2
    assert model.estimate_session_bytes(DenseConfig(), double)["kv_cache"] == 2 * base
    assert model.estimate_session_bytes(DenseConfig(), wide)["kv_cache"] == 2 * base
    # 32 values take 34 bytes, in f16 64.
    assert model.estimate_session_bytes(DenseConfig(), narrow)["kv_cache"] * 64 == 34 * base


def test_cache_type_that_does_not_fit_the_heads(tiny_model: TinyModelFactory) -> None:
    shape = replace(SHAPE, cache_type="q8_0")
    with (
        NativeModelFile(tiny_model(tensor_type="Q8_0", head_dim=24)) as file,
        pytest.raises(UsageError, match="multiple of 32 dimensions, not of 24; use --cache"),
    ):
        estimate_session_bytes(file.config, DenseConfig(), shape)


def test_runner_tells_its_sizes_and_its_position(model: NativeModel) -> None:
    runner = model.start_session(H2OConfig(local=4, heavy=4), SHAPE)
    assert (runner.max_context, runner.batch_size, runner.chunk_size) == (96, 32, 16)
    assert runner.prefill(TOKENS, is_last=False) is None
    logits = runner.prefill(TOKENS[:5], is_last=True)
    assert logits is not None
    assert runner.position == 37
    assert runner.pairs_dense == 37 * 38 // 2
    assert 0 < runner.pairs_computed < runner.pairs_dense
    runner.decode(int(logits.argmax()))
    assert runner.position == 38


def test_reset_gives_the_first_answer_again(model: NativeModel) -> None:
    runner = model.start_session(H2OConfig(local=4, heavy=4), SHAPE)
    first = runner.prefill(TOKENS, is_last=True)
    decoded = runner.decode(7)
    runner.reset()
    assert runner.position == 0
    np.testing.assert_array_equal(runner.prefill(TOKENS, is_last=True), first)
    np.testing.assert_array_equal(runner.decode(7), decoded)


def test_layers_are_reported_in_order(model: NativeModel) -> None:
    runner = model.start_session(DenseConfig(), SHAPE)
    reports: list[tuple[int, int]] = []
    runner.prefill(TOKENS, is_last=True, on_layer=lambda *report: reports.append(report))
    n_layers = model.config.n_layers
    assert reports == [(done, n_layers) for done in range(1, n_layers + 1)]


def test_missing_tensors_name_the_file(path: Path) -> None:
    with NativeModelFile(path) as file:
        last: TensorBinding = file._bindings.pop()
        with pytest.raises(FormatError, match=f"{path.name}: .*{last.name}"):
            file.load()


def test_allocation_failures_become_resource_errors(
    path: Path, model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    class FullMemory:
        n_bytes_done = 0
        run = fail

        def take_all_threads(self) -> None: ...

        def cancel(self) -> None: ...

        def __init__(self, *_: object) -> None: ...

    monkeypatch.setattr(_core, "Sequence", fail)
    with pytest.raises(ResourceError, match="96 positions could not be allocated"):
        model.start_session(DenseConfig(), SHAPE)
    monkeypatch.setattr(_core, "WeightReader", FullMemory)
    with (
        NativeModelFile(path) as file,
        pytest.raises(ResourceError, match=r"out of memory after 0 of \d+ bytes of weights"),
    ):
        file.load()


def test_sessions_share_a_workspace_as_long_as_one_lives(model: NativeModel) -> None:
    first = model.start_session(DenseConfig(), SHAPE)
    second = model.start_session(H2OConfig(local=4, heavy=4), SHAPE)
    assert first.workspace is second.workspace
    before = weakref.ref(first.workspace)
    del first
    assert model.start_session(DenseConfig(), SHAPE).workspace is second.workspace
    del second
    assert before() is None
