"""Models that memory does not hold: parts of the packed file are read whenever they are needed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, GenerationResult, PrefillConfig, SamplingParams
from edgeh2o.errors import EdgeH2OError, FormatError, ResourceError
from edgeh2o.formats import packed_file
from edgeh2o.host import memory
from edgeh2o.runners import packed_weights
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.runners.kept_weights import load, logits, made_files
from tests.tiny_models import TinyModelFactory

MODELS: dict[str, dict[str, object]] = {
    "dense": {"tensor_type": "Q8_0", "tied": False},
    "tied": {"tensor_type": "Q4_0"},
    "experts": {"architecture": "qwen3moe", "tensor_type": "Q4_0"},
    "shared-expert": {"architecture": "qwen2moe", "tensor_type": "Q8_0"},
    "recurrent": {"architecture": "falcon-h1"},
    "inputs-per-token": {"architecture": "gemma3n"},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large models have: several parts, and pages that take little of the room."""
    monkeypatch.setattr(packed_weights, "PART_BYTES", 5000)
    monkeypatch.setattr(packed_weights, "PAGES_BYTES", 1000)
    monkeypatch.setattr(packed_weights, "EXPERT_PAGES_BYTES", 1000)


def _load(path: Path, folder: Path, part: float) -> NativeModel:
    with NativeModelFile(path, packed_weights=str(folder)) as file:
        assert file.leave_on_disk(int(part * file.n_weight_bytes))
        return file.load()


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_weights_in_memory(
    tiny_model: TinyModelFactory, tmp_path: Path, name: str
) -> None:
    path = tiny_model(**MODELS[name])
    expected = load(path)
    mapped = [_load(path, tmp_path, part).mapped_weight_bytes for part in (0.2, 0.5, 0.8)]
    assert mapped == sorted(mapped, reverse=True)
    assert 0 < mapped[-1] <= mapped[0] < expected.weight_bytes
    assert mapped[-1] < mapped[0] or name == "experts"  # they are most of it
    model = _load(path, tmp_path, 0.5)
    assert model.weight_bytes == expected.weight_bytes
    for _ in range(2):  # pages are asked for again
        np.testing.assert_array_equal(logits(model), logits(expected))
    with NativeModelFile(path) as file:
        for item in file._bindings:
            np.testing.assert_array_equal(
                model.dequantize(item.name), expected.dequantize(item.name)
            )


def test_experts_stay_in_the_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    path = tiny_model(**MODELS["experts"])
    with NativeModelFile(path) as file:
        experts = sum(item.held_bytes for item in file._bindings if "_exps." in item.name)
    assert _load(path, tmp_path, 0.99).mapped_weight_bytes >= experts


@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_are_taken_into_memory_as_output_matrix(
    tiny_model: TinyModelFactory, tmp_path: Path, is_tied: bool
) -> None:
    path = tiny_model(tensor_type="F16", tied=is_tied, vocab_size=5000)
    with NativeModelFile(path) as file:
        n_bytes = {item.name: item.held_bytes for item in file._bindings}["token_embd.weight"]
    mapped = _load(path, tmp_path, 0.85).mapped_weight_bytes
    assert (mapped < n_bytes) is is_tied
    assert mapped < 1.01 * n_bytes  # panels are filled up


@pytest.mark.parametrize(("kept", "part"), [(False, 0.5), (True, 0.01)])
def test_what_cannot_stay_on_the_disk(path: Path, tmp_path: Path, kept: bool, part: float) -> None:
    name = str(tmp_path / "kept") if kept else "off"
    with NativeModelFile(path, packed_weights=name) as file:
        assert not file.leave_on_disk(int(part * file.n_weight_bytes))
        assert (file.load().mapped_weight_bytes > 0) is kept


def test_a_full_disk_ends_the_loading(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = packed_file.RESERVE_BYTES // 4096 + 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(ResourceError, match=r"does not fit in memory.* cannot be kept.* has room"):
        _load(path, tmp_path / "kept", 0.5)
    assert os.listdir(tmp_path / "kept") == []


def test_a_damaged_file_is_made_anew(path: Path, tmp_path: Path) -> None:
    expected = logits(_load(path, tmp_path / "kept", 0.5))
    (file,) = (tmp_path / "kept").glob("*.packed")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="packed anew"):
        np.testing.assert_array_equal(logits(_load(path, tmp_path / "kept", 0.5)), expected)


@pytest.mark.parametrize("part", [None, 0.5])
def test_a_model_file_that_ends_early(path: Path, tmp_path: Path, part: float | None) -> None:
    """It is at fault, not the place of packed weights."""
    with NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file:
        if part is not None:
            assert file.leave_on_disk(int(part * file.n_weight_bytes))
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(EdgeH2OError, match=r"model\.gguf: .*") as caught:
            file.load()
    assert isinstance(caught.value, FormatError)
    assert "packed" not in str(caught.value)
    assert not made_files(tmp_path / "kept")


def test_a_model_larger_than_memory_answers_with_a_warning(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tensor_type="F32", ffn_dim=4096)

    def answer(folder: Path | str) -> GenerationResult:
        with LLM(
            path,
            attention="dense",
            context_size=64,
            prefill=PrefillConfig(batch_size=32, chunk_size=32),
            packed_weights=folder,
        ) as llm:
            return llm.generate("ab", SamplingParams(max_tokens=4, temperature=0))

    expected = answer("off")
    sizes = dict(expected.stats.memory_bytes)
    weights = sizes.pop("weights")
    room = 64 * 2**20 + sum(sizes.values()) + weights // 2
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    with pytest.raises(ResourceError, match=r"leave weights on the disk \(--packed-weights auto\)"):
        answer("off")
    with pytest.warns(UserWarning, match=r"do not fit in memory, .* read from the disk"):
        result = answer(tmp_path)
    assert result.token_ids == expected.token_ids
    assert result.stats.memory_bytes["weights"] < weights // 2
    assert result.stats.memory_bytes["mapped_weights"] > weights // 2
