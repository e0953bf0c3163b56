"""Files are replaced as one step, with the permissions that a user expects."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeh2o.formats.atomic_file import replacing, why_unwritable


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_permissions_of_the_umask(umask: None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert permissions(path) == 0o640


def test_a_replaced_file_keeps_its_permissions(umask: None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert permissions(path) == 0o600


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path, folder = tmp_path / "file", tmp_path / "folder"
    path.write_bytes(b"old")
    folder.mkdir()
    with pytest.raises(type(error)), replacing(path, folder=folder) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(folder.iterdir()) == [] and list(tmp_path.iterdir()) == [path, folder]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "file"):
        pass


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    for content in (b"new", b"newer"):
        with replacing(link) as file:
            file.write(content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(path) as file:
            file.write(b"new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_folder_that_takes_no_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, blocked = tmp_path / "new" / "deep", tmp_path / "file"
    blocked.touch()
    link = tmp_path / "link"
    link.symlink_to(missing / "a")
    assert why_unwritable(tmp_path / "a") is why_unwritable(blocked) is None
    for path in (missing / "a", link):
        assert why_unwritable(path) == f"there is no folder {missing}"
        assert why_unwritable(path, makes_folders=True) is None
    for makes_folders in (False, True):
        reason = why_unwritable(blocked / "a", makes_folders=makes_folders)
        assert reason == f"there is no folder {blocked}"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert why_unwritable(tmp_path / "a") == f"nothing can be written in {tmp_path}"
    reason = why_unwritable(missing / "a", makes_folders=True)
    assert reason == f"nothing can be written in {tmp_path}"
