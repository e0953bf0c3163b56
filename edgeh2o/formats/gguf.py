"""GGUF file: bounded header parsing, tensor data by positioned reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from ..errors import FormatError
from .foreign_magic import PROBE_BYTES, describe_foreign_file
from .gguf_cursor import MAGIC
from .gguf_header import GgufHeader, TensorInfo, read_header
from .metadata import Metadata, MetadataValue, quote
from .open_file import OpenFile, open_regular_file, read_at

__all__ = ["GgufFile", "Metadata", "MetadataValue", "TensorInfo", "open_gguf"]


@final
class GgufFile(OpenFile):
    """An open GGUF file. Use ``open_gguf`` to make one; usable as a context manager."""

    __slots__ = ("_header", "_owners", "_shards", "_tensors")

    def __init__(self, path: Path, descriptor: int, header: GgufHeader | None) -> None:
        """The header is read where it is asked for, if it is None."""
        super().__init__(path, descriptor)
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

        Raises as ``read``.
        """
        return memoryview(self.source(info).read(info.offset, info.n_bytes))

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last ``n_bytes`` of a tensor, or all of it twice; as tensor_bytes."""
        owner = self.source(info)
        n_bytes = min(n_bytes, info.n_bytes)
        last = info.offset + info.n_bytes - n_bytes
        first, end = owner.read(info.offset, n_bytes), owner.read(last, n_bytes)
        return memoryview(first), memoryview(end)

    def source(self, info: TensorInfo) -> GgufFile:
        """The file that holds a tensor: this one or one that was joined to it."""
        return self._owners.get(info.name, self)

    def close(self) -> None:
        """Closes the file and those joined to it."""
        for shard in self._shards:
            shard.close()
        super().close()


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


def _check_magic(path: Path, start: bytes) -> None:
    if not start:
        raise FormatError(f"{path}: the file is empty; fetch it again")
    if not start.startswith(MAGIC):
        foreign = describe_foreign_file(start)
        hint = f"it looks like {foreign}" if foreign else "check that it is the right file"
        raise FormatError(f"{path}: not a GGUF file; {hint}")
