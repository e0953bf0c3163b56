"""Files are replaced as one step, with the permissions that a user expects."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.formats import atomic_file
from edgeh2o.formats.atomic_file import check_writable, filling, replacing, write_file


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


def test_a_place_is_tried_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, blocked = tmp_path / "new" / "deep", tmp_path / "file"
    blocked.touch()
    link = tmp_path / "link"
    link.symlink_to(missing / "a")
    for good in (tmp_path / "a", blocked, Path("/dev/full")):
        check_writable(good, "-o")
    for path in (missing / "a", link):
        with pytest.raises(UsageError, match=f"-o {path} cannot .* no folder {missing}; write"):
            check_writable(path, "-o")
        check_writable(path, "-o", makes_folders=True)
    for makes_folders in (False, True):
        with pytest.raises(UsageError, match=f"there is no folder {blocked}; write elsewhere"):
            check_writable(blocked / "a", "-o", makes_folders=makes_folders)
    with pytest.raises(UsageError, match="it is a folder; name a file"):
        check_writable(tmp_path, "-o")
    with pytest.raises(ResourceError, match="File name too long; write elsewhere"):
        check_writable(tmp_path / ("a" * 300), "-o")
    assert sorted(tmp_path.iterdir()) == [blocked, link]

    def write_nothing(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file, "_create_locked", write_nothing)
    with pytest.raises(ResourceError, match="cannot be written: No space left on device"):
        check_writable(blocked, "-o")


def test_a_file_that_cannot_be_written_is_no_wrong_usage(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (Path("/dev/full"), "No space left")):
        with pytest.raises(ResourceError, match=f"cannot write it .*: {reason}.*; free some space"):
            write_file(path, "text", what="it")


def fill(folder: Path, error: BaseException | None = None) -> None:
    with filling(folder) as create:
        for name in ("a", "b"):
            create(name).write(name.encode())
        assert not (folder / "a").exists()
        if error is not None:
            raise error


def test_a_folder_is_filled_as_one_step(umask: None, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for folder in (tmp_path / "new" / "deep", tmp_path / "link"):
        fill(folder)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "a", "b": "b"}
        assert permissions(folder / "a") == 0o640
    for folder in (tmp_path / "empty", tmp_path):
        before = list(folder.iterdir())
        with pytest.raises(UsageError, match=f"{folder} is not empty; name a new folder"):
            fill(folder)
        assert list(folder.iterdir()) == before
    with pytest.raises(ResourceError, match=r"cannot make the folder .*: File exists"):
        fill(tmp_path / "empty" / "a")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ValueError()])
def test_a_folder_that_fails_is_left_as_it_was(tmp_path: Path, error: BaseException) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "new" / "deep"):
        with pytest.raises(type(error)):
            fill(folder, error)
    assert list(tmp_path.iterdir()) == [empty] and list(empty.iterdir()) == []


def test_a_name_that_is_not_given_takes_back_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail_second(source: str, target: Path) -> None:
        if target.name == "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_second)
    with pytest.raises(OSError, match="Input/output error"):
        fill(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_what_comes_into_a_folder_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(UsageError, match="is not empty"), filling(folder) as create:
        create("a").write(b"mine")
        (folder / "a").write_text("theirs")
    assert [path.read_text() for path in folder.iterdir()] == ["theirs"]


WRITER = """
import sys
from pathlib import Path
from edgeh2o.formats.atomic_file import replacing
with replacing(Path(sys.argv[1])) as file:
    print(file.name, flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a temporary file open until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    killed, abandoned = start_writer(tmp_path / "a")
    killed.kill()
    killed.communicate()
    assert abandoned.exists() and f"-{killed.pid}-" in abandoned.name
    elsewhere = tmp_path / abandoned.name.replace(os.uname().nodename, "elsewhere")
    elsewhere.touch()
    alive, in_use = start_writer(tmp_path / "b")
    with replacing(tmp_path / "c"), replacing(tmp_path / "d"):
        assert len(list(tmp_path.glob(".*"))) == 4  # two here, one in use, one elsewhere
        assert in_use.exists() and elsewhere.exists() and not abandoned.exists()
    alive.communicate("")
    assert alive.returncode == 0
    assert sorted(tmp_path.iterdir()) == [elsewhere, *(tmp_path / name for name in "bcd")]
