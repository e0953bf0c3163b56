"""Files of packed weights that are damaged, forged or cannot be written: packed anew, and said."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.formats import packed_file
from edgeh2o.formats.packed_file import open_packed
from edgeh2o.runners import packed_weights
from edgeh2o.runners.native import NativeModelFile
from tests.runners.kept_weights import is_mapped, kept_file, load, logits


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:4096] + bytes(len(data) - 4096)]
)
def test_a_damaged_file_is_named_and_made_anew(
    path: Path, kept: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = kept_file(kept)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with (
        pytest.warns(UserWarning, match=rf"{file}: .*; the weights are packed anew"),
        NativeModelFile(path, packed_weights=str(kept)) as opened,
    ):
        assert is_mapped(opened.load())
    assert file.read_bytes() == content
    assert is_mapped(load(path, kept))


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
    file = kept_file(kept)
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
    np.testing.assert_array_equal(logits(model), logits(load(path)))


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
                place = (name, kind, kind, rows, cols, offset)
                _core.map_packed(model._core_model, data.fileno(), [place], False)
        np.testing.assert_array_equal(model.dequantize(name), before)
        assert model.mapped_weight_bytes == 0


@pytest.mark.parametrize("blocks", ["folder", "file"])
def test_what_cannot_be_kept_is_one_warning(path: Path, tmp_path: Path, blocks: str) -> None:
    folder = tmp_path / "kept"
    if blocks == "folder":
        folder.write_bytes(b"a diary")
    else:
        load(path, folder)
        kept_file(folder).write_bytes(b"a diary" * 1000)
    with (
        warnings.catch_warnings(record=True) as caught,
        NativeModelFile(path, packed_weights=str(folder)) as file,
    ):
        warnings.simplefilter("always")
        model = file.load()
    np.testing.assert_array_equal(logits(model), logits(load(path)))
    messages = [str(each.message) for each in caught]
    assert sum("packed weights are not kept" in each for each in messages) == 1
    diary = folder if blocks == "folder" else kept_file(folder)
    assert diary.read_bytes().startswith(b"a diary")


def test_a_home_that_does_not_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", "/proc/none")
    with (
        pytest.warns(UserWarning, match="packed weights are not kept: cannot make the folder"),
        NativeModelFile(path, packed_weights="auto") as file,
    ):
        file.load()


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


def test_a_mapped_file_that_is_removed_goes_on_to_serve(path: Path, kept: Path) -> None:
    model = load(path, kept)
    kept_file(kept).unlink()
    np.testing.assert_array_equal(logits(model), logits(load(path)))
