"""Files that are written or replaced as one step."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


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
    temporary = (folder or path.parent) / f".edgeh2o-{os.urandom(8).hex()}.tmp"
    try:
        with temporary.open("xb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def why_unwritable(path: Path, *, makes_folders: bool = False) -> str | None:
    """What would keep ``replacing`` from making ``path``, as far as its folder tells, or None.

    ``makes_folders``: those that are missing are made before.
    """
    folder = Path(os.path.realpath(path)).parent
    if makes_folders:
        folder = next(each for each in (folder, *folder.parents) if each.exists())
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK):
        return f"nothing can be written in {folder}"
    return None


def _sync_folder(folder: Path) -> None:
    """Puts the rename itself on the disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
