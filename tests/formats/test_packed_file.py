"""Files of packed matrices: what is written is read again, and what is not ours is left alone."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.formats import packed_file
from edgeh2o.formats.packed_file import (
    HEAD_BYTES,
    MAX_FILES,
    PackedTable,
    PackedWriter,
    open_packed,
    packed_path,
    write_packed_file,
)

SIZES = (64, 100, 5000, 70_000)
DESCRIBED = [(f"blk.{i}.weight", "Q4_0", 1, 32, n) for i, n in enumerate(SIZES)]


def _content(number: int) -> bytes:
    return bytes((number + i) % 251 for i in range(SIZES[number]))


def _write_matrices(writer: PackedWriter) -> None:
    for number, described in enumerate(DESCRIBED):
        os.pwrite(writer.descriptor, _content(number), writer.add(*described))


def _write(path: Path, model: Path, key: str = "key") -> Path:
    write_packed_file(path, key, model, sum(SIZES), _write_matrices)
    return path


def _read(path: Path) -> PackedTable | None:
    opened = open_packed(path)
    if opened is None:
        return None
    os.close(opened[0])
    return opened[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def path(tmp_path: Path, model: Path) -> Path:
    return _write(tmp_path / "kept" / "model.packed", model)


def test_what_is_written_is_read(path: Path, model: Path) -> None:
    table = _read(path)
    assert table is not None
    assert (table.key, table.model) == ("key", str(model))
    assert [tuple(each[:4]) for each in table.matrices] == [item[:4] for item in DESCRIBED]
    content = path.read_bytes()
    for number, each in enumerate(table.matrices):
        assert each.offset % 64 == 0
        assert content[each.offset : each.offset + each.n_bytes] == _content(number)


def test_a_file_that_is_missing_is_none(tmp_path: Path) -> None:
    assert open_packed(tmp_path / "none.packed") is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"x", "bytes, not"),
        (lambda data: data[:100], "ends after 100 bytes"),
        (lambda data: b"", "ends after 0 bytes"),
        (lambda data: b"GGUFFILE" + data[8:], "not a file of packed weights"),
        (lambda data: data[:8] + b"\2\0\0\0" + data[12:], "format version is 2, not 1"),
        (lambda data: data[:-3] + b"xxx", "table cannot be"),
        (lambda data: data.replace(b"blk.0", b"blk.9"), "checksum"),
        (lambda data: data[:HEAD_BYTES] + bytes(4096) + data[HEAD_BYTES + 4096 :], "checksum"),
    ],
)
def test_damage_is_named(
    path: Path, damage: Callable[[bytes], bytes], problem: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.packed"
    bad.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match=rf"^{bad}: .*{problem}"):
        open_packed(bad)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.packed")
    for name in ("pipe.packed", ""):
        with pytest.raises(FormatError, match="remove it"):
            open_packed(tmp_path / name)


_NUMBERS = st.integers(-(2**70), 2**70)
_ROW = st.tuples(st.text(), st.text(), *[_NUMBERS] * 4) | st.lists(_NUMBERS | st.text(), max_size=8)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(_ROW, max_size=3), where=st.integers(0, 2**20), bits=st.integers(1, 255))
def test_no_table_and_no_bit_makes_it_read_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], where: int, bits: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "model.gguf").touch()
    data = bytearray(_write(folder / "a.packed", folder / "model.gguf").read_bytes())
    place = packed_file._HEAD.unpack_from(data)[3]
    table = json.dumps({"key": "key", "model": "m", "matrices": rows}).encode()
    (folder / "forged.packed").write_bytes(data)
    with (folder / "forged.packed").open("r+b") as file:
        packed_file.seal_packed(folder / "forged.packed", file.fileno(), table, place)
    data[where % len(data)] ^= bits
    (folder / "flipped.packed").write_bytes(data)
    for name in ("forged.packed", "flipped.packed"):
        try:
            read = _read(folder / name)
        except FormatError:
            continue
        assert read is not None
        assert all(HEAD_BYTES <= each.offset < place for each in read.matrices)
        assert all(each.offset + each.n_bytes <= place for each in read.matrices)


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "model.packed"
    path.write_bytes(b"a diary")
    with pytest.raises(UsageError, match="not a file of packed weights"):
        _write(path, model)
    assert path.read_bytes() == b"a diary"


def test_a_damaged_file_of_ours_is_replaced(path: Path, model: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    assert _read(_write(path, model, "new")).key == "new"  # type: ignore[union-attr]


def test_a_full_disk_leaves_nothing_and_what_was_there(path: Path, model: Path) -> None:
    before = path.read_bytes()

    def fail(writer: PackedWriter) -> None:
        _write_matrices(writer)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match="No space left on device; free some space"):
        write_packed_file(path, "new", model, sum(SIZES), fail)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_room_is_looked_for_before(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = packed_file.RESERVE_BYTES // 4096 + 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(ResourceError, match="has room for 4096 bytes and packed weights take"):
        _write(tmp_path / "kept" / "model.packed", model)
    assert os.listdir(tmp_path / "kept") == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot make the folder"):
        _write(tmp_path / "file" / "kept" / "model.packed", model)


def test_files_whose_model_is_gone_go_and_others_stay(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "kept"
    gone = tmp_path / "gone.gguf"
    gone.touch()
    orphan = _write(folder / "gone.packed", gone)
    foreign = folder / "foreign.packed"
    foreign.write_bytes(b"a diary")
    newer = folder / "newer.packed"
    newer.write_bytes(orphan.read_bytes()[:8] + b"\2\0\0\0" + orphan.read_bytes()[12:])
    gone.unlink()
    _write(folder / "model.packed", model)
    assert sorted(os.listdir(folder)) == ["foreign.packed", "model.packed", "newer.packed"]


def test_what_was_used_least_lately_goes(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "kept"
    for number in range(MAX_FILES + 1):
        path = _write(folder / f"{number}.packed", model)
        os.utime(path, (100 + number, 100 + number))
    packed_file.touch(folder / "1.packed")
    _write(folder / "last.packed", model)
    assert sorted(os.listdir(folder)) == sorted(
        ["1.packed", *(f"{number}.packed" for number in range(3, MAX_FILES + 1)), "last.packed"]
    )


def test_names_tell_models_and_layouts_apart(tmp_path: Path) -> None:
    models = [tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf", tmp_path / ("x" * 255)]
    layouts = [(1, 8, 0), (1, 16, 0), (2, 16, 0)]
    names = {packed_path(tmp_path, model, layout).name for model in models for layout in layouts}
    assert len(names) == 9
    assert max(map(len, names)) < 200
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    linked = packed_path(tmp_path, link / "model.gguf", layouts[0])
    assert linked == packed_path(tmp_path, models[0], layouts[0])
