"""Packed weights that are kept and mapped: the same numbers, and never those of another model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams, _core
from edgeh2o.errors import UsageError
from edgeh2o.runners.native import NativeModelFile
from tests.random_blocks import MIXED, rewrite
from tests.runners.kept_weights import is_mapped, kept_file, load, logits, made_files
from tests.tiny_models import TinyModelFactory

WIDE = {"model_dim": 256, "ffn_dim": 256, "head_dim": 64}
MODELS: dict[str, dict[str, object]] = {
    **{kind: {"tensor_type": kind} for kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0")},
    **{kind: {"tensor_type": kind, **WIDE} for kind in ("Q4_K", "Q6_K")},
    "untied": {"tensor_type": "Q8_0", "tied": False, "biases": True},
    "experts": {"architecture": "qwen3moe", "tensor_type": "Q4_0"},
    "latent": {"architecture": "deepseek2"},
    "fused": {"architecture": "phi3"},
    "recurrent": {"architecture": "falcon-h1"},
    "inputs-per-token": {"architecture": "gemma3n"},
}


@pytest.mark.parametrize("name", MODELS)
def test_mapped_weights_are_those_that_were_packed(
    tiny_model: TinyModelFactory, tmp_path: Path, name: str
) -> None:
    model_path = tiny_model(**MODELS[name])
    models = [load(model_path, folder) for folder in (None, tmp_path, tmp_path)]
    assert [is_mapped(model) for model in models] == [False, True, True]
    assert len({model.weight_bytes for model in models}) == 1
    expected, packed, mapped = map(logits, models)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(mapped, expected)
    with NativeModelFile(model_path) as file:
        for item in file._bindings:
            np.testing.assert_array_equal(
                models[2].dequantize(item.name), models[0].dequantize(item.name)
            )


def test_types_that_are_held_as_others(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    wide = tiny_model(tensor_type="Q8_0", n_heads=2, n_kv_heads=2, **{**WIDE, "head_dim": 128})
    path = rewrite(wide, tmp_path / "mixed.gguf", MIXED)
    models = [load(path, folder) for folder in (None, tmp_path / "kept", tmp_path / "kept")]
    assert is_mapped(models[2])
    np.testing.assert_array_equal(logits(models[2]), logits(models[0]))


def test_statistics_say_what_is_mapped(path: Path, tmp_path: Path) -> None:
    def memory() -> tuple[int, int]:
        with LLM(path, packed_weights=tmp_path / "kept", attention="dense") as llm:
            stats = llm.generate("ab", SamplingParams(max_tokens=1)).stats
        return stats.memory_bytes["weights"], stats.memory_bytes.get("mapped_weights", 0)

    with LLM(path, attention="dense") as llm:
        packed = llm.generate("ab", SamplingParams(max_tokens=1)).stats.memory_bytes["weights"]
    first, second = memory(), memory()
    assert first == second
    assert first[1] > first[0] > 0
    assert sum(first) == packed


def test_progress_ends_at_its_total(path: Path, kept: Path) -> None:
    reports: list[tuple[int, int]] = []
    with NativeModelFile(path, packed_weights=str(kept)) as file:
        assert is_mapped(file.load(on_bytes=lambda done, total: reports.append((done, total))))
    assert reports[-1][0] == reports[-1][1] > 0


@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_model_file_that_was_replaced(
    tiny_model: TinyModelFactory, path: Path, kept: Path, keeps_time: bool
) -> None:
    old, before = logits(load(path, kept)), path.stat()
    new = tiny_model(tensor_type="Q4_0", seed=5)
    assert new.stat().st_size == before.st_size
    path.write_bytes(new.read_bytes())
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    before_it = made_files(kept)
    changed = load(path, kept)
    assert made_files(kept) != before_it
    expected = logits(load(new))
    assert not np.array_equal(expected, old)
    np.testing.assert_array_equal(logits(changed), expected)
    before_it = made_files(kept)
    again = load(path, kept)
    assert is_mapped(again)
    assert made_files(kept) == before_it
    np.testing.assert_array_equal(logits(again), expected)
    assert len(list(kept.glob("*.packed"))) == 1


def test_one_byte_inside_of_a_tensor(path: Path, kept: Path) -> None:
    with NativeModelFile(path) as file:
        info = max(file.tensors, key=lambda each: each.n_bytes)
    data = bytearray(path.read_bytes())
    data[info.offset + info.n_bytes // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    before = made_files(kept)
    load(path, kept)
    assert made_files(kept) != before


def test_a_model_that_changes_while_it_is_packed_is_not_kept(path: Path, tmp_path: Path) -> None:
    with (
        NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file,
        pytest.warns(UserWarning, match="not kept: .* was changed while it was read"),
    ):
        model = file.load(on_bytes=lambda *_: os.utime(path, ns=(1, 1)))
    assert not is_mapped(model)
    assert os.listdir(tmp_path / "kept") == []


def test_weights_in_another_order(path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later version may read the same file."""
    with NativeModelFile(path, packed_weights=str(kept)) as file:
        item = next(item for item in file._bindings if item.row_order is not None)
        item.row_order[0], item.row_order[1] = item.row_order[1], item.row_order[0]
        before = made_files(kept)
        file.load()
        assert made_files(kept) != before


def test_another_version_of_the_layout(
    path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _core.packed_layout

    def later(model: _core.Model) -> tuple[int, int, int]:
        version, *rest = layout(model)
        return version + 1, *rest  # type: ignore[return-value]

    monkeypatch.setattr(_core, "packed_layout", later)
    for _ in range(2):
        assert is_mapped(load(path, kept))
    assert len(made_files(kept)) == 2


def test_instruction_sets_share_a_file_of_one_layout(path: Path, tmp_path: Path) -> None:
    before, layouts = _core.active_isa(), set()
    try:
        for isa in _core.available_isas():
            _core.use_isa(isa)
            with NativeModelFile(path) as file:
                layouts.add(_core.packed_layout(file.load()._core_model))
            kept = load(path, tmp_path / "kept")
            assert len(list((tmp_path / "kept").glob("*.packed"))) == len(layouts)
            np.testing.assert_array_equal(logits(kept), logits(load(path)))
    finally:
        _core.use_isa(before)


def test_the_cache_folder_is_the_default(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        with NativeModelFile(path, packed_weights="auto") as file:
            model = file.load()
    assert is_mapped(model)
    assert kept_file(tmp_path / "cache" / "packed").name.startswith("model-")


def test_what_is_no_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"packed_weights \(--packed-weights\) are for GGUF files"):
        LLM(tmp_path, packed_weights="auto")


@pytest.mark.parametrize("value", ["", 3])
def test_a_folder_that_is_none(path: Path, value: object) -> None:
    from edgeh2o.config import RuntimeConfig

    with pytest.raises(UsageError, match=r"packed_weights \(--packed-weights\) must be auto, off"):
        RuntimeConfig(packed_weights=value)  # type: ignore[arg-type]
