"""GGUF file: bounded header parsing, tensor data by positioned reads.

The file is read and never mapped: a map of a file that another process cuts short kills the
reader with SIGBUS, while a read that comes back short is an error like any other.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn, final

from ..errors import FormatError, ResourceError
from .foreign_magic import PROBE_BYTES, describe_foreign_file
from .gguf_header import MAGIC, GgufHeader, TensorInfo, read_header
from .metadata import Metadata, MetadataValue, quote

__all__ = ["GgufFile", "Metadata", "MetadataValue", "TensorInfo", "open_gguf"]


@final
class GgufFile:
    """An open GGUF file. Use ``open_gguf`` to make one; usable as a context manager."""

    __slots__ = ("_descriptor", "_header", "_owners", "_shards", "_tensors", "path")

    def __init__(self, path: Path, descriptor: int, header: GgufHeader | None) -> None:
        """The header is read where it is asked for, if it is None."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._header = header
        self._tensors = dict(header.tensors) if header else {}
        self._shards: list[GgufFile] = []
        self._owners: dict[str, GgufFile] = {}

    @property
    def header(self) -> GgufHeader:
        """What precedes the tensor data."""
        if self._header is None:
            self._header = _read_header(self.path, self.fileno())
        return self._header

    @property
    def metadata(self) -> Metadata:
        """Key-value pairs, with typed getters."""
        return self.header.metadata

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Tensors by name, in file order, those of joined files last."""
        return self._tensors

    def join(self, shard: GgufFile) -> None:
        """Takes over a further file of the same model: its tensors count as this file's.

        It is closed with this one. Raises ``FormatError`` if both have a tensor of one name.
        """
        self._shards.append(shard)
        for name, info in shard.tensors.items():
            if name in self._tensors:
                raise FormatError(
                    f"{shard.path}: tensor {quote(name)} is in another file of the model too; "
                    "fetch all files of the model again"
                )
            self._tensors[name] = info
            self._owners[name] = shard

    def duplicate(self) -> GgufFile:
        """The same file, and those joined to it, with descriptors of their own.

        It holds no metadata, whose texts take megabytes, until they are asked for.
        """
        copy = GgufFile(self.path, os.dup(self.fileno()), None)
        copy._tensors = self._tensors
        for shard in self._shards:
            twin = shard.duplicate()
            copy._shards.append(twin)
            copy._owners |= dict.fromkeys(shard.tensors, twin)
        return copy

    def tensor_bytes(self, info: TensorInfo) -> memoryview:
        """The stored bytes of a tensor: a read-only copy, ``info.n_bytes`` long.

        Raises ``FormatError`` if the file has become shorter since it was opened and
        ``ResourceError`` if it cannot be read.
        """
        return self.source(info).read(info.offset, info.n_bytes)

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last ``n_bytes`` of a tensor, or all of it twice; as tensor_bytes."""
        owner = self.source(info)
        n_bytes = min(n_bytes, info.n_bytes)
        last = info.offset + info.n_bytes - n_bytes
        return owner.read(info.offset, n_bytes), owner.read(last, n_bytes)

    def source(self, info: TensorInfo) -> GgufFile:
        """The file that holds a tensor: this one or one that was joined to it."""
        return self._owners.get(info.name, self)

    def fileno(self) -> int:
        """The descriptor of this file, for reads at offsets."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def read(self, offset: int, n_bytes: int) -> memoryview:
        """Bytes of this file; raises as ``tensor_bytes``."""
        return memoryview(read_at(self.path, self.fileno(), offset, n_bytes))

    def close(self) -> None:
        """Closes the file and those joined to it."""
        for shard in self._shards:
            shard.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """A copy would close the descriptor of this one."""
        raise TypeError("an open file cannot be copied or pickled; see duplicate()")


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Opens a GGUF file and reads its header.

    Raises ``ResourceError`` if the file cannot be read and ``FormatError`` if it is not a GGUF
    file or is malformed; the message names the file, the key or tensor, and the cure.
    """
    file_path = Path(path)
    descriptor = open_regular_file(file_path)
    try:
        return GgufFile(file_path, descriptor, _read_header(file_path, descriptor))
    except BaseException:
        os.close(descriptor)
        raise


def _read_header(path: Path, descriptor: int) -> GgufHeader:
    def read(offset: int, n_bytes: int) -> bytes:
        return read_at(path, descriptor, offset, n_bytes)

    n_bytes = os.fstat(descriptor).st_size
    _check_magic(path, read(0, min(n_bytes, PROBE_BYTES)))
    try:
        return read_header(read, n_bytes)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def open_regular_file(path: Path) -> int:
    """A descriptor of a file. Raises ResourceError, and FormatError for what is no file."""
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
        raise FormatError(f"{path}: is a directory; give the .gguf file inside it")
    raise FormatError(f"{path}: is not a regular file (a pipe or a device); give a .gguf file")


def _check_magic(path: Path, start: bytes) -> None:
    if not start:
        raise FormatError(f"{path}: the file is empty; fetch it again")
    if not start.startswith(MAGIC):
        foreign = describe_foreign_file(start)
        hint = f"it looks like {foreign}" if foreign else "check that it is the right file"
        raise FormatError(f"{path}: not a GGUF file; {hint}")


def read_at(path: Path, descriptor: int, offset: int, n_bytes: int) -> bytes:
    """Bytes of an open file, all of them. Raises FormatError if it ends before, ResourceError."""
    pieces: list[bytes] = []
    while n_bytes > 0:  # one call reads at most 2 GiB
        try:
            piece = os.pread(descriptor, n_bytes, offset)
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
