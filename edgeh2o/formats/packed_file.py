"""Files of packed matrices: what the kernels read, to be mapped in place of packing it anew.

Layout, little-endian: a block of 4,096 bytes, then the matrices, each at a multiple of 64, then a
table in JSON. The block begins with magic, format version (u32), bytes of the table (u32), its
place (u64), and the BLAKE2b hash of the table and of samples of the matrices. The table says what
the file was made of (``key``), of which model file, and of each matrix its name, type, rows,
columns, place and bytes.

A file is made anew when it cannot be used; nothing of it is believed before it was compared with
the model and with the length of the file. Its end is never cut off in place, which would kill those
who have mapped it: it is replaced and removed as a whole.
"""

from __future__ import annotations

import json
import os
import re
import struct
from _blake2 import blake2b
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FormatError, ResourceError, UsageError
from .atomic_file import make_folder, replacing
from .known_models import cache_folder
from .open_file import open_regular_file, read_at

SUFFIX = ".packed"
MAGIC, FORMAT_VERSION = b"EH2OPACK", 1
HEAD_BYTES = 4096
MAX_TABLE_BYTES = 2**26
ALIGNMENT = 64  # kAlignment of cpp/base/arena.h
# Pieces of the matrices that the hash covers, evenly spread.
N_SAMPLES, SAMPLE_BYTES = 64, 4096
DIGEST_BYTES = 16
# What stays free on the disk, and files of the size of a model that a folder may hold: those used
# least lately go.
RESERVE_BYTES = 64 * 2**20
MAX_FILES = 8

_HEAD = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s")
_MAX_STEM = 100


class PackedMatrix(NamedTuple):
    """One matrix: what it is, and its bytes in the file."""

    name: str
    type_name: str
    rows: int
    cols: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PackedTable:
    """What a file says of itself: ``model`` is the path of the file it was made of."""

    key: str
    model: str
    matrices: tuple[PackedMatrix, ...]


class PackedWriter:
    """A file of packed matrices as it is written: they go one behind the other."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.matrices: list[PackedMatrix] = []
        self.end = HEAD_BYTES

    def add(self, name: str, type_name: str, rows: int, cols: int, n_bytes: int) -> int:
        """Where the bytes of the next matrix go."""
        matrix = PackedMatrix(name, type_name, rows, cols, self.end, n_bytes)
        self.matrices.append(matrix)
        self.end += -(-n_bytes // ALIGNMENT) * ALIGNMENT
        return matrix.offset


def packed_path(folder: Path, model: Path, layout: Sequence[int]) -> Path:
    """The file of a model file and a layout: one for each, replaced where the model was."""
    real = os.path.realpath(model)
    digest = blake2b(os.fsencode(real) + repr(tuple(layout)).encode(), digest_size=8).hexdigest()
    return folder / f"{Path(real).stem[:_MAX_STEM]}-{digest}{SUFFIX}"


def packed_folder(name: str) -> Path:
    """That of ``name``, or ``packed`` in the cache folder for "auto". Raises ResourceError."""
    return cache_folder() / "packed" if name == "auto" else Path(os.path.expanduser(name))


def open_packed(path: Path) -> tuple[int, PackedTable] | None:
    """A descriptor of a file and its table; None if there is none.

    Raises FormatError for what is no such file or is damaged, ResourceError.
    """
    if not os.path.lexists(path):
        return None
    descriptor = open_regular_file(path, "remove it")
    try:
        return descriptor, _read_table(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def write_packed_file(
    path: Path, key: str, model: Path, n_bytes: int, write: Callable[[PackedWriter], None]
) -> None:
    """Writes a file, or replaces one of ours, as one step; others go for room.

    ``write`` adds the matrices and writes them, ``n_bytes`` or a little more.
    Raises ResourceError, and leaves nothing behind, where there is no room or no access; UsageError
    where another file stands in the way; and what ``write`` does.
    """
    make_folder(path.parent)
    if os.path.lexists(path) and not _is_ours(path):
        raise UsageError(f"{path} is not a file of packed weights; remove it or name a folder")
    try:
        system = os.statvfs(path.parent)
        room = system.f_bavail * system.f_frsize - RESERVE_BYTES
        if n_bytes > room:
            raise ResourceError(
                f"{path.parent} has room for {max(0, room)} bytes and packed weights take "
                f"{n_bytes}; free some, or name another folder"
            )
        with replacing(path) as file:
            writer = PackedWriter(file.fileno())
            write(writer)
            said = {"key": key, "model": os.path.realpath(model), "matrices": writer.matrices}
            table = json.dumps(said).encode("ascii")
            seal_packed(Path(file.name), writer.descriptor, table, writer.end)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror}; free some space, or name another folder"
        ) from None
    _remove_old(path.parent, but=path)


def seal_packed(path: Path, descriptor: int, table: bytes, end: int) -> None:
    """Writes the table behind the matrices of ``path``, which end at ``end``, and the head.

    Raises OSError, and FormatError where another process has cut the file short.
    """
    os.ftruncate(descriptor, end)
    _write_at(descriptor, end, table)
    with path.open("rb") as file:  # the descriptor may be for writing alone
        digest = _digest(path, file.fileno(), table, end)
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, len(table), end, digest)
    _write_at(descriptor, 0, head.ljust(HEAD_BYTES, b"\0"))


def touch(path: Path) -> None:
    """Says that a file was used now."""
    with suppress(OSError):
        os.utime(path)


def _read_table(path: Path, descriptor: int) -> PackedTable:
    n_bytes = os.fstat(descriptor).st_size
    if n_bytes < HEAD_BYTES:
        raise FormatError(f"{path}: it ends after {n_bytes} bytes")
    magic, version, table_bytes, place, digest = _HEAD.unpack(
        read_at(path, descriptor, 0, _HEAD.size)
    )
    if magic != MAGIC:
        raise FormatError(f"{path}: it is not a file of packed weights")
    if version != FORMAT_VERSION:
        raise FormatError(f"{path}: its format version is {version}, not {FORMAT_VERSION}")
    if table_bytes > MAX_TABLE_BYTES or place < HEAD_BYTES or place + table_bytes != n_bytes:
        raise FormatError(f"{path}: it has {n_bytes} bytes, not {place + table_bytes}")
    text = read_at(path, descriptor, place, table_bytes)
    table = _parse_table(text)
    if table is None or not all(_lies_within(each, place) for each in table.matrices):
        raise FormatError(f"{path}: its table cannot be")
    if _digest(path, descriptor, text, place) != digest:
        raise FormatError(f"{path}: its checksum is wrong")
    return table


def _parse_table(text: bytes) -> PackedTable | None:
    try:
        said: Any = json.loads(text)
        matrices = tuple(PackedMatrix(*row) for row in said["matrices"])
        table = PackedTable(said["key"], said["model"], matrices)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = [table.key, table.model, *(text for each in matrices for text in each[:2])]
    counts = [count for each in matrices for count in each[2:]]
    are_texts = all(isinstance(each, str) for each in texts)
    are_counts = all(type(each) is int and 0 < each < 2**63 for each in counts)
    are_words = are_texts and all(re.fullmatch(r"\w+", each.type_name, re.A) for each in matrices)
    return table if are_words and are_counts else None


def _lies_within(matrix: PackedMatrix, end: int) -> bool:
    begin = matrix.offset
    return begin >= HEAD_BYTES and begin % ALIGNMENT == 0 and matrix.n_bytes <= end - begin


def _digest(path: Path, descriptor: int, table: bytes, end: int) -> bytes:
    digest = blake2b(table, digest_size=DIGEST_BYTES)
    n_bytes = min(SAMPLE_BYTES, end - HEAD_BYTES)
    last = end - HEAD_BYTES - n_bytes
    for number in range(N_SAMPLES):
        offset = HEAD_BYTES + last * number // (N_SAMPLES - 1)
        digest.update(read_at(path, descriptor, offset, n_bytes))
    return digest.digest()


def _write_at(descriptor: int, offset: int, data: bytes) -> None:
    while data:
        n = os.pwrite(descriptor, data, offset)
        data, offset = data[n:], offset + n


def _is_ours(path: Path) -> bool:
    """By its first bytes, whatever its state and version."""
    try:
        descriptor = open_regular_file(path)
    except (FormatError, ResourceError):
        return False
    try:
        return os.pread(descriptor, len(MAGIC), 0) == MAGIC
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, *, but: Path) -> None:
    """Removes files whose model is gone, and those used least lately of more than ``MAX_FILES``.

    One of another version, or damaged, goes by its age.
    """
    kept = []
    for path in folder.glob(f"*{SUFFIX}"):
        if path == but or path.is_symlink() or not _is_ours(path):
            continue
        with suppress(OSError):
            if _is_orphan(path):
                path.unlink()
            else:
                kept.append((path.stat().st_mtime, path))
    for _, path in sorted(kept, reverse=True)[MAX_FILES - 1 :]:
        with suppress(OSError):
            path.unlink()


def _is_orphan(path: Path) -> bool:
    try:
        opened = open_packed(path)
    except (FormatError, ResourceError):
        return False
    if opened is None:
        return False
    os.close(opened[0])
    return not os.path.exists(opened[1].model)
