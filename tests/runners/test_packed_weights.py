"""Packed weights that are kept and mapped: the same numbers, and never those of another model."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import LLM, SamplingParams, _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.errors import UsageError
from edgeh2o.formats import one_at_a_time, packed_file
from edgeh2o.formats.packed_file import open_packed
from edgeh2o.runners import packed_weights
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.random_blocks import MIXED, rewrite
from tests.tiny_models import TinyModelFactory

SHAPE = SessionShape(max_context=64, batch_size=32, chunk_size=32, cache_type="f32")
PROMPT = np.arange(2, 22, dtype=np.int32)
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


def _load(path: Path, folder: Path | None = None) -> NativeModel:
    """Without a folder as always; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = "off" if folder is None else str(folder)
        with NativeModelFile(path, packed_weights=name) as file:
            return file.load()


def _logits(model: NativeModel) -> NDArray[np.float32]:
    runner = model.start_session(DenseConfig(), SHAPE)
    first = runner.prefill(PROMPT, is_last=True)
    assert first is not None
    return np.stack([np.array(first), np.array(runner.decode(3))])


def _is_mapped(model: NativeModel) -> bool:
    return model.mapped_weight_bytes > 0


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(tensor_type="Q4_0"), tmp_path / "model.gguf"))


@pytest.fixture
def kept(path: Path, tmp_path: Path) -> Path:
    """A folder with the packed weights of ``path``."""
    folder = tmp_path / "kept"
    _load(path, folder)
    return folder


def _kept_file(folder: Path) -> Path:
    (file,) = folder.glob("*.packed")
    return file


@pytest.mark.parametrize("name", MODELS)
def test_mapped_weights_are_those_that_were_packed(
    tiny_model: TinyModelFactory, tmp_path: Path, name: str
) -> None:
    model_path = tiny_model(**MODELS[name])
    models = [_load(model_path, folder) for folder in (None, tmp_path, tmp_path)]
    assert [_is_mapped(model) for model in models] == [False, False, True]
    assert len({model.weight_bytes for model in models}) == 1
    expected, packed, mapped = map(_logits, models)
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
    models = [_load(path, folder) for folder in (None, tmp_path / "kept", tmp_path / "kept")]
    assert _is_mapped(models[2])
    np.testing.assert_array_equal(_logits(models[2]), _logits(models[0]))


def test_statistics_say_what_is_mapped(path: Path, tmp_path: Path) -> None:
    def memory() -> tuple[int, int]:
        with LLM(path, packed_weights=tmp_path / "kept", attention="dense") as llm:
            stats = llm.generate("ab", SamplingParams(max_tokens=1)).stats
        return stats.memory_bytes["weights"], stats.memory_bytes.get("mapped_weights", 0)

    packed, mapped = memory(), memory()
    assert packed[1] == 0
    assert mapped[1] > mapped[0] > 0
    assert sum(mapped) == packed[0]


def test_progress_ends_at_its_total(path: Path, kept: Path) -> None:
    reports: list[tuple[int, int]] = []
    with NativeModelFile(path, packed_weights=str(kept)) as file:
        assert _is_mapped(file.load(on_bytes=lambda done, total: reports.append((done, total))))
    assert reports[-1][0] == reports[-1][1] > 0


@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_model_file_that_was_replaced(
    tiny_model: TinyModelFactory, path: Path, kept: Path, keeps_time: bool
) -> None:
    old, before = _logits(_load(path, kept)), path.stat()
    new = tiny_model(tensor_type="Q4_0", seed=5)
    assert new.stat().st_size == before.st_size
    path.write_bytes(new.read_bytes())
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = _load(path, kept)
    assert not _is_mapped(changed)
    expected = _logits(_load(new))
    assert not np.array_equal(expected, old)
    np.testing.assert_array_equal(_logits(changed), expected)
    again = _load(path, kept)
    assert _is_mapped(again)
    np.testing.assert_array_equal(_logits(again), expected)
    assert len(list(kept.glob("*.packed"))) == 1


def test_one_byte_inside_of_a_tensor(path: Path, kept: Path) -> None:
    with NativeModelFile(path) as file:
        info = max(file.tensors, key=lambda each: each.n_bytes)
    data = bytearray(path.read_bytes())
    data[info.offset + info.n_bytes // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert not _is_mapped(_load(path, kept))


def test_a_model_that_changes_while_it_is_loaded_is_not_kept(path: Path, tmp_path: Path) -> None:
    with NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file:
        file.load(meanwhile=lambda: os.utime(path, ns=(1, 1)))
    assert os.listdir(tmp_path / "kept") == []


def test_weights_in_another_order(path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later version may read the same file."""
    with NativeModelFile(path, packed_weights=str(kept)) as file:
        item = next(item for item in file._bindings if item.row_order is not None)
        item.row_order[0], item.row_order[1] = item.row_order[1], item.row_order[0]
        assert not _is_mapped(file.load())


def test_another_version_of_the_layout(
    path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _core.packed_layout

    def later(model: _core.Model) -> tuple[int, int, int]:
        version, *rest = layout(model)
        return version + 1, *rest  # type: ignore[return-value]

    monkeypatch.setattr(_core, "packed_layout", later)
    assert not _is_mapped(_load(path, kept))
    assert _is_mapped(_load(path, kept))
    assert len(list(kept.glob("*.packed"))) == 2


def test_instruction_sets_share_a_file_of_one_layout(path: Path, tmp_path: Path) -> None:
    before, layouts = _core.active_isa(), set()
    try:
        for isa in _core.available_isas():
            _core.use_isa(isa)
            with NativeModelFile(path) as file:
                layouts.add(_core.packed_layout(file.load()._core_model))
            kept = _load(path, tmp_path / "kept")
            assert len(list((tmp_path / "kept").glob("*.packed"))) == len(layouts)
            np.testing.assert_array_equal(_logits(kept), _logits(_load(path)))
    finally:
        _core.use_isa(before)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:4096] + bytes(len(data) - 4096)]
)
def test_a_damaged_file_is_named_and_made_anew(
    path: Path, kept: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = _kept_file(kept)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with (
        pytest.warns(UserWarning, match=rf"{file}: .*; the weights are packed anew"),
        NativeModelFile(path, packed_weights=str(kept)) as opened,
    ):
        assert not _is_mapped(opened.load())
    assert file.read_bytes() == content
    assert _is_mapped(_load(path, kept))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": 1}, "is 1 x"),
        ({"cols": 2**62}, "expected"),
        ({"rows": 2**64}, "table cannot be"),
        ({"type_name": "F32"}, "is not held as F32"),
        ({"type_name": "F\ud800"}, "table cannot be"),
        ({"type_name": "Q9_Z"}, "Q9_Z is not supported"),
        ({"name": "output_norm.weight"}, "not those of the model"),
        ({"offset": 2**30}, "table cannot be"),
        ({"offset": 4097}, "table cannot be"),
        ({"offset": -64}, "table cannot be"),
    ],
)
def test_a_forged_table_with_a_good_hash(
    path: Path, kept: Path, changes: dict[str, object], problem: str
) -> None:
    file = _kept_file(kept)
    opened = open_packed(file)
    assert opened is not None
    descriptor, table = opened
    os.close(descriptor)
    rows: list[tuple[object, ...]] = list(table.matrices)
    rows[1] = table.matrices[1]._replace(**changes)  # type: ignore[arg-type]
    _forge(file, table.key, rows)
    with (
        pytest.warns(UserWarning, match=f"{file}: .*{problem}"),
        NativeModelFile(path, packed_weights=str(kept)) as model_file,
    ):
        model = model_file.load()
    assert not _is_mapped(model)
    np.testing.assert_array_equal(_logits(model), _logits(_load(path)))


def _forge(file: Path, key: str, rows: list[tuple[object, ...]]) -> None:
    _, _, _, place, _ = packed_file._HEAD.unpack_from(file.read_bytes())
    table = json.dumps({"key": key, "model": "model", "matrices": rows}).encode()
    with file.open("r+b") as out:
        packed_file.seal_packed(file, out.fileno(), table, place)


def test_matrices_that_end_behind_the_file_are_refused_by_the_core(
    path: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(8192))
    with NativeModelFile(path) as file, short.open("rb") as data:
        model = file.load()
        name = "token_embd.weight"
        kind, rows, cols, n_bytes = _core.describe_packed(model._core_model, name)
        before = model.dequantize(name)
        for offset in (0, 64, 8192, 2**40, 63):
            assert n_bytes > 8192
            with pytest.raises(ValueError, match="token_embd"):
                _core.map_packed(
                    model._core_model, data.fileno(), [(name, kind, kind, rows, cols, offset)]
                )
        np.testing.assert_array_equal(model.dequantize(name), before)
        assert model.mapped_weight_bytes == 0


@pytest.mark.parametrize("blocks", ["folder", "file"])
def test_what_cannot_be_kept_is_one_warning(path: Path, tmp_path: Path, blocks: str) -> None:
    folder = tmp_path / "kept"
    if blocks == "folder":
        folder.write_bytes(b"a diary")
    else:
        _load(path, folder)
        _kept_file(folder).write_bytes(b"a diary" * 1000)
    with (
        warnings.catch_warnings(record=True) as caught,
        NativeModelFile(path, packed_weights=str(folder)) as file,
    ):
        warnings.simplefilter("always")
        model = file.load()
    np.testing.assert_array_equal(_logits(model), _logits(_load(path)))
    messages = [str(each.message) for each in caught]
    assert sum("packed weights are not kept" in each for each in messages) == 1
    diary = folder if blocks == "folder" else _kept_file(folder)
    assert diary.read_bytes().startswith(b"a diary")


def test_a_home_that_does_not_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", "/proc/none")
    with (
        pytest.warns(UserWarning, match="packed weights are not kept: cannot make the folder"),
        NativeModelFile(path, packed_weights="auto") as file,
    ):
        file.load()


def test_the_cache_folder_is_the_default(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        with NativeModelFile(path, packed_weights="auto") as file:
            model = file.load()
    assert _is_mapped(model)
    assert _kept_file(tmp_path / "cache" / "packed").name.startswith("model-")


def test_an_interrupt_while_it_is_written_leaves_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packed_weights._core, "write_packed", interrupt)
    with (
        NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file,
        pytest.raises(KeyboardInterrupt),
    ):
        file.load()
    assert os.listdir(tmp_path / "kept") == []


def test_several_processes_at_once(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from edgeh2o import LLM, SamplingParams\n"
        "for _ in range(3):\n"
        "    with LLM(sys.argv[1], packed_weights=sys.argv[2]) as llm:\n"
        "        result = llm.generate('ab', SamplingParams(max_tokens=3, temperature=0))\n"
        "print(result.token_ids, 'mapped_weights' in result.stats.memory_bytes)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(path), str(tmp_path / "kept")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(set(outputs)) == 1
    assert outputs[0].endswith(" True\n")
    assert len(os.listdir(tmp_path / "kept")) == 1


def test_the_second_of_two_takes_what_the_first_has_packed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both packed the model and wrote the file."""
    waits, n_written = Event(), []
    try_lock, write = one_at_a_time._try_lock, packed_weights.write_packed_file

    def note_waiting(lock: Path) -> int | None:
        held = try_lock(lock)
        if held is None:
            waits.set()
        return held

    def write_late(*arguments: Any) -> None:
        n_written.append(1)
        assert waits.wait(60)
        write(*arguments)

    monkeypatch.setattr(one_at_a_time, "_try_lock", note_waiting)
    monkeypatch.setattr(packed_weights, "write_packed_file", write_late)
    monkeypatch.setattr(packed_weights, "WAIT_S", 60.0)

    def load(_: int) -> NativeModel:
        with NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file:
            return file.load()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load, range(2))
    assert len(n_written) == 1
    assert sorted([_is_mapped(first), _is_mapped(second)]) == [False, True]
    np.testing.assert_array_equal(_logits(first), _logits(second))
    assert len(os.listdir(tmp_path / "kept")) == 1


@pytest.mark.parametrize("fails", ["held for ever", "no locks", "a pipe", "a link", "a folder"])
def test_a_lock_that_cannot_be_had_delays_at_most(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    _load(path, tmp_path / "kept")
    file = _kept_file(tmp_path / "kept")
    lock = file.with_suffix(packed_weights.LOCK_SUFFIX)
    file.unlink()
    with ExitStack() as stack:
        if fails == "held for ever":
            holder = stack.enter_context(lock.open("wb"))
            fcntl.flock(holder, fcntl.LOCK_EX)
            monkeypatch.setattr(packed_weights, "WAIT_S", 0.1)
        elif fails == "no locks":

            def refuse(*_: object) -> None:
                raise OSError(errno.ENOLCK, "no locks available")

            monkeypatch.setattr(one_at_a_time.fcntl, "flock", refuse)
        elif fails == "a pipe":
            os.mkfifo(lock)
        elif fails == "a link":
            lock.symlink_to(tmp_path / "elsewhere")
        else:
            lock.mkdir()
        assert not _is_mapped(_load(path, tmp_path / "kept"))
        assert _is_mapped(_load(path, tmp_path / "kept"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_that_is_killed_leaves_no_lock(path: Path, tmp_path: Path) -> None:
    _load(path, tmp_path / "kept")
    file = _kept_file(tmp_path / "kept")
    file.unlink()
    script = (
        "import os, sys\n"
        "from edgeh2o import LLM\n"
        "from edgeh2o.runners import packed_weights\n"
        "packed_weights.write_packed_file = lambda *_: os._exit(9)\n"
        "LLM(sys.argv[1], packed_weights=sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "kept")]
    assert subprocess.run(command, check=False).returncode == 9
    assert file.with_suffix(packed_weights.LOCK_SUFFIX).exists()
    _load(path, tmp_path / "kept")
    assert os.listdir(tmp_path / "kept") == [file.name]


def test_a_mapped_file_that_is_removed_goes_on_to_serve(path: Path, kept: Path) -> None:
    model = _load(path, kept)
    _kept_file(kept).unlink()
    np.testing.assert_array_equal(_logits(model), _logits(_load(path)))


def test_what_is_no_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"packed_weights \(--packed-weights\) are for GGUF files"):
        LLM(tmp_path, packed_weights="auto")


@pytest.mark.parametrize("value", ["", 3])
def test_a_folder_that_is_none(path: Path, value: object) -> None:
    from edgeh2o.config import RuntimeConfig

    with pytest.raises(UsageError, match=r"packed_weights \(--packed-weights\) must be auto, off"):
        RuntimeConfig(packed_weights=value)  # type: ignore[arg-type]
