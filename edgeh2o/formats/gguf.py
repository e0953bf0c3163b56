"""Memory-mapped GGUF file: bounded header parsing, zero-copy tensor views.

The header is parsed once, by ``gguf_header``; tensor data is paged in only when it is read and
can be dropped again tensor by tensor, so that loading a model does not hold it twice.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import final

from ..errors import FormatError, ResourceError
from .foreign_magic import PROBE_BYTES, describe_foreign_file
from .gguf_header import MAGIC, GgufHeader, TensorInfo, read_header
from .metadata import Metadata, MetadataValue

__all__ = ["GgufFile", "Metadata", "MetadataValue", "TensorInfo", "open_gguf"]


@final
class GgufFile:
    """An open GGUF file. Use ``open_gguf`` to make one; usable as a context manager."""

    __slots__ = ("_descriptor", "_header", "_map", "path")

    def __init__(self, path: Path, descriptor: int, mapping: mmap.mmap, header: GgufHeader) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._map: mmap.mmap | None = mapping
        self._header = header

    @property
    def version(self) -> int:
        """Version of the format, 2 or 3."""
        return self._header.version

    @property
    def alignment(self) -> int:
        """Alignment of tensor data in bytes."""
        return self._header.alignment

    @property
    def data_offset(self) -> int:
        """Byte of the file at which the tensor data begins."""
        return self._header.data_offset

    @property
    def metadata(self) -> Metadata:
        """Key-value pairs, with typed getters."""
        return self._header.metadata

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Tensors by name, in file order."""
        return self._header.tensors

    def tensor_bytes(self, info: TensorInfo) -> memoryview:
        """The stored bytes of a tensor as a read-only view of the mapping, ``info.n_bytes`` long.

        The view stays valid after ``close``. Raises ``FormatError`` if the file has become
        shorter since it was opened: touching the lost pages would kill the process.
        """
        mapping, descriptor = self._open_mapping()
        stop = info.offset + info.n_bytes
        if os.fstat(descriptor).st_size < stop:
            raise FormatError(
                f"{self.path}: the file became shorter while it was open; "
                "do not overwrite a model in place while it is in use"
            )
        return memoryview(mapping)[info.offset : stop]

    def release(self, info: TensorInfo) -> None:
        """Drop the whole pages of a tensor from memory; a later read brings them back."""
        mapping, _ = self._open_mapping()
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Close the file. Views handed out keep the mapping alive until they are gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._map = None

    def _open_mapping(self) -> tuple[mmap.mmap, int]:
        if self._map is None or self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._map, self._descriptor

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Map a GGUF file and read its header.

    Raises ``ResourceError`` if the file cannot be read and ``FormatError`` if it is not a GGUF
    file or is malformed; the message names the file, the key or tensor, and the cure.
    """
    file_path = Path(path)
    descriptor = _open_regular_file(file_path)
    try:
        mapping = _map_file(file_path, descriptor)
        try:
            header = read_header(mapping)
        except FormatError as error:
            raise FormatError(f"{file_path}: {error}") from None
        return GgufFile(file_path, descriptor, mapping, header)
    except BaseException:
        os.close(descriptor)
        raise


def _open_regular_file(path: Path) -> int:
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


def _map_file(path: Path, descriptor: int) -> mmap.mmap:
    if os.fstat(descriptor).st_size == 0:
        raise FormatError(f"{path}: the file is empty; fetch it again")
    try:
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise ResourceError(
            f"{path}: cannot be mapped into memory: {error}; "
            "a 32-bit system or an address space limit may be too small for it"
        ) from None
    start = mapping[:PROBE_BYTES]
    if not start.startswith(MAGIC):
        foreign = describe_foreign_file(start)
        hint = f"it looks like {foreign}" if foreign else "check that it is the right file"
        raise FormatError(f"{path}: not a GGUF file; {hint}")
    return mapping
