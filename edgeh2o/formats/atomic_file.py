"""Files that are written or replaced as one step."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import ResourceError, UsageError

_TEMPORARY = ".edgeh2o-*.tmp"


def write_file(path: Path, content: bytes | str, *, what: str = "the file") -> None:
    """Writes or replaces a file as one step, text in UTF-8.

    Raises ResourceError, which calls the file ``what``, if it cannot be written; what was there
    before is then unchanged.
    """
    try:
        with replacing(path) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
    except OSError as error:
        raise ResourceError(
            f"cannot write {what} {path}: {error.strerror}; free some space or write it elsewhere"
        ) from None


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, if they are missing. Raises ResourceError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make the folder {path}: {error.strerror}") from None


@contextmanager
def replacing(path: Path, *, folder: Path | None = None) -> Iterator[IO[bytes]]:
    """A new file that takes the name ``path`` once it is on the disk, or vanishes.

    A full disk or an interrupt leaves what was there before. The new file has the permissions of
    the old one, else those of the umask. It is written in ``folder``, which must be of the same
    file system (default: that of ``path``, or of the file that a link there leads to). What is no
    regular file, such as a device, is written to as it is. Raises OSError.
    """
    if folder is None:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        path = Path(os.path.realpath(path))
    with _temporary(folder or path.parent) as file:
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)
    _sync_folder(path.parent)


@contextmanager
def filling(folder: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A new or empty folder, whose files take their names once all are on the disk, or vanish.

    Gives a function that opens a file of a name. What fails or is interrupted leaves the folder
    empty, or missing if it was made here, and so those above it. Raises UsageError for a folder
    that is not empty, ResourceError for one that cannot be made, OSError for what is not written.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        make_folder(folder)
        _require_empty(folder)
        with ExitStack() as stack:
            files: dict[Path, IO[bytes]] = {}

            def create(name: str) -> IO[bytes]:
                file = files[folder / name] = stack.enter_context(_temporary(folder))
                return file

            yield create
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            _require_empty(folder)
            _rename_all(files)
        _sync_folder(folder)
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


def _rename_all(files: Mapping[Path, IO[bytes]]) -> None:
    try:
        for path, file in files.items():
            os.replace(file.name, path)
    except BaseException:
        for path, file in files.items():
            with suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    path.unlink()
        raise


def _require_empty(folder: Path) -> None:
    """Raises UsageError for a folder that holds other than temporary files."""
    try:
        is_empty = all(path.match(_TEMPORARY) for path in folder.iterdir())
    except OSError as error:
        raise ResourceError(f"cannot read the folder {folder}: {error.strerror}") from None
    if not is_empty:
        raise UsageError(f"{folder} is not empty; name a new folder")


def check_writable(path: Path, flag: str, *, makes_folders: bool = False) -> None:
    """Tries, before the work of minutes, whether ``replacing`` could make ``path``.

    A block is written beside it and removed again. ``flag`` is what named the path;
    ``makes_folders``: those that are missing are made before. Raises UsageError for a path that
    cannot be a file's, ResourceError with the reason of the system, such as a full disk.
    """
    try:
        place = Path(os.path.realpath(path))
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # a name too long; from CPython 3.14 on ``exists`` hides it
        if place.is_dir():
            raise UsageError(f"{flag} {path} cannot be written: it is a folder; name a file")
        if place.exists() and not place.is_file():
            return
        folder = place.parent
        if makes_folders:
            folder = next(each for each in (folder, *folder.parents) if each.exists())
        if not folder.is_dir():
            raise UsageError(
                f"{flag} {path} cannot be written: there is no folder {folder}; write elsewhere"
            )
        with _temporary(folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ResourceError(
            f"{flag} {path} cannot be written: {error.strerror}; write elsewhere"
        ) from None


@contextmanager
def _temporary(folder: Path) -> Iterator[IO[bytes]]:
    """A hidden file, locked as long as its process lives; removed unless it was renamed."""
    start = f".edgeh2o-{os.uname().nodename}-"
    for left in folder.glob(_TEMPORARY):
        if left.name.startswith(start):  # of other hosts the lock may not tell
            with suppress(OSError), left.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free once the process is dead
                left.unlink()
    with _create_locked(folder, start) as file:
        try:
            yield file
        finally:
            with suppress(OSError):
                os.unlink(file.name)


def _create_locked(folder: Path, start: str) -> IO[bytes]:
    while True:
        file = (folder / f"{start}{os.getpid()}-{os.urandom(8).hex()}.tmp").open("xb")
        with suppress(OSError):  # a file system without locks; nothing is removed there
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):  # else another process was faster than the lock
            return file
        file.close()


def _sync_folder(folder: Path) -> None:
    """Puts the rename itself on the disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
