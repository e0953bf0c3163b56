"""Files of weights that stay open: regular ones, read at offsets and never mapped.

A map of a file that another process cuts short kills the reader with SIGBUS, while a read that
comes back short is an error like any other.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import FormatError, ResourceError

if TYPE_CHECKING:
    from typing_extensions import Self

# Of one call: macOS refuses 2 GiB and more, of which Linux reads a part.
MAX_READ_BYTES = 2**30


class OpenFile:
    """An open file, which closes its descriptor; usable as a context manager."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def fileno(self) -> int:
        """The descriptor, for reads at offsets. Raises ValueError once the file is closed."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Bytes of the file, all of them.

        Raises ``FormatError`` if it has become shorter since it was opened and ``ResourceError`` if
        it cannot be read.
        """
        return read_at(self.path, self.fileno(), offset, n_bytes)

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """A copy would close the descriptor of this one."""
        raise TypeError("an open file cannot be copied or pickled; see duplicate()")


def open_regular_file(path: Path, cure: str | None = None) -> int:
    """A descriptor of a file. Raises ResourceError, and FormatError for what is no file.

    ``cure`` is that of the latter, by default to give a GGUF file instead.
    """
    # A FIFO would block open() for ever, hence O_NONBLOCK and the check of the open descriptor.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise ResourceError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ResourceError(f"{path}: cannot be read: {reason}") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise FormatError(f"{path}: is a directory; {cure or 'give the .gguf file inside it'}")
    what = "is not a regular file (a pipe or a device)"
    raise FormatError(f"{path}: {what}; {cure or 'give a .gguf file'}")


def read_at(path: Path, descriptor: int, offset: int, n_bytes: int) -> bytes:
    """Bytes of an open file, all of them. Raises FormatError if it ends before, ResourceError."""
    pieces: list[bytes] = []
    while n_bytes > 0:
        try:
            piece = os.pread(descriptor, min(n_bytes, MAX_READ_BYTES), offset)
        except OSError as error:
            raise unreadable(path, error) from None
        if not piece:
            raise truncated(path)
        pieces.append(piece)
        offset += len(piece)
        n_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def unreadable(path: Path, error: OSError) -> ResourceError:
    """The error of a read that failed."""
    return ResourceError(f"{path}: cannot be read: {error.strerror}")


def truncated(path: Path) -> FormatError:
    """The error of a read that came back short."""
    return FormatError(
        f"{path}: the file became shorter while it was open; "
        "do not overwrite a model in place while it is in use"
    )
