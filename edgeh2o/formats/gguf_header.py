"""Parser of a GGUF header: counts, metadata, tensor list. Everything in the file is untrusted.

Its bytes come by a ``HeaderCursor``, which bounds what is believed of them. Sizes are Python
integers, so no product wraps. Only little-endian files of version 2 and 3 are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import FormatError
from .gguf_cursor import MAX_HEADER_BYTES, HeaderCursor, ReadBytes
from .gguf_types import (
    FOREIGN_TENSOR_TYPES,
    IK_TENSOR_TYPES,
    REMOVED_TENSOR_TYPES,
    SCALAR_CODES,
    TENSOR_TYPES,
    ValueType,
)
from .metadata import Metadata, StoredNumbers, StoredValue, quote

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_KEYS = 2**16
MAX_TENSORS = 2**18
MAX_KEY_BYTES = 2**16 - 1
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMS = 4
MAX_TENSOR_VALUES = 2**62

_VALUE_TYPES = {int(kind): kind for kind in ValueType}

# Smallest possible entries: key length, key, type, value; name length, name, dims, type, offset.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    ``shape`` is in GGUF order, contiguous dimension first. ``offset`` is in bytes from the start
    of the file and ``n_bytes`` excludes the padding.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    n_bytes: int
    offset: int

    @property
    def cols(self) -> int:
        """Length of a row: the contiguous dimension."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all other dimensions, 1 for a vector."""
        count = 1
        for size in self.shape[1:]:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What precedes the tensor data, which begins at byte ``data_offset``.

    ``version`` is 2 or 3, ``alignment`` that of tensors in bytes.
    """

    version: int
    alignment: int
    data_offset: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_header(read: ReadBytes, file_bytes: int) -> GgufHeader:
    """Parses the header of a GGUF file of ``file_bytes`` bytes whose magic was checked already.

    Raises ``FormatError`` that names the key or the tensor and the byte offset.
    """
    cursor = HeaderCursor(read, file_bytes)
    version = _read_version(cursor)
    n_tensors = cursor.count("the number of tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
    n_keys = cursor.count("the number of metadata keys", _MIN_KEY_BYTES, MAX_KEYS)

    values: dict[str, StoredValue] = {}
    alignment = DEFAULT_ALIGNMENT
    for index in range(n_keys):
        cursor.place = f"metadata key {index + 1} of {n_keys}"
        key = cursor.name("the key", MAX_KEY_BYTES)
        cursor.place = f"metadata key {quote(key)}"
        if key in values:
            raise cursor.error("appears twice")
        kind = _read_value_type(cursor)
        if key == ALIGNMENT_KEY:
            alignment = _read_alignment(cursor, kind)
            values[key] = alignment
        else:
            values[key] = _read_value(cursor, kind)

    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for index in range(n_tensors):
        cursor.place = f"tensor {index + 1} of {n_tensors}"
        name = cursor.name("the name", MAX_TENSOR_NAME_BYTES)
        cursor.place = f"tensor {quote(name)}"
        if name in entries:
            raise cursor.error("appears twice")
        entries[name] = _read_tensor_entry(cursor)

    data_offset = _align_up(cursor.position, alignment)
    tensors = _place_tensors(entries, data_offset, alignment, file_bytes)
    return GgufHeader(version, alignment, data_offset, Metadata(values), tensors)


def _read_version(cursor: HeaderCursor) -> int:
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "this is a big-endian GGUF file; convert it to little-endian with "
            "gguf_convert_endian.py of the gguf package"
        )
    raise cursor.error(
        f"GGUF version {version} is not supported, only 2 and 3 are; "
        "convert the model again with a current converter"
    )


def _read_value_type(cursor: HeaderCursor) -> ValueType:
    number = cursor.u32("the value type")
    kind = _VALUE_TYPES.get(number)
    if kind is None:
        raise cursor.error(f"unknown value type {number}; the file is damaged")
    return kind


def _read_alignment(cursor: HeaderCursor, kind: ValueType) -> int:
    if kind is not ValueType.UINT32:
        raise cursor.error(f"must be of type UINT32, not {kind.name}")
    alignment = cursor.u32("the alignment")
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"the alignment is {alignment}, but must be a power of two up to {MAX_ALIGNMENT}"
        )
    return alignment


def _read_value(cursor: HeaderCursor, kind: ValueType) -> StoredValue:
    if kind is ValueType.STRING:
        return cursor.string("the string")
    if kind is ValueType.ARRAY:
        return _read_array(cursor)
    value = cursor.scalar(SCALAR_CODES[kind], "the value")
    if kind is ValueType.BOOL:
        if value > 1:
            raise cursor.error(f"a boolean must be stored as 0 or 1, not {value}")
        return bool(value)
    return value


def _read_array(cursor: HeaderCursor) -> StoredValue:
    kind = _read_value_type(cursor)
    if kind is ValueType.ARRAY:
        raise cursor.error("arrays of arrays are not supported")
    item_bytes = 8 if kind is ValueType.STRING else SCALAR_CODES[kind].size
    count = cursor.count("the number of items", item_bytes, MAX_HEADER_BYTES)
    if kind is ValueType.STRING:
        return cursor.strings(count)

    start = cursor.position
    cursor.position += count * item_bytes
    items = cursor.data[start : cursor.position]
    if kind is not ValueType.BOOL:
        return StoredNumbers(items, SCALAR_CODES[kind].format)  # NumPy spells types alike
    if items.strip(b"\0\1"):
        raise cursor.error("a boolean must be stored as 0 or 1")
    return StoredNumbers(items, "?")


def _read_tensor_entry(cursor: HeaderCursor) -> tuple[str, tuple[int, ...], int, int]:
    """Type name, shape, size in bytes and offset inside the data section."""
    n_dims = cursor.u32("the number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"has {n_dims} dimensions, but must have 1 to {MAX_DIMS}")
    shape = tuple(cursor.u64(f"dimension {axis}") for axis in range(n_dims))
    n_values = 1
    for axis, size in enumerate(shape):
        if size < 1:
            raise cursor.error(f"dimension {axis} is 0")
        n_values *= size
        if n_values >= MAX_TENSOR_VALUES:
            raise cursor.error(f"shape {shape} holds more values than any file can")

    number = cursor.u32("the tensor type")
    if number in REMOVED_TENSOR_TYPES:
        raise cursor.error(
            f"type {REMOVED_TENSOR_TYPES[number]} (id {number}) was removed from the format; "
            f"quantise the model again, for example to Q4_0{FOREIGN_TENSOR_TYPES.get(number, '')}"
        )
    if number in IK_TENSOR_TYPES:
        raise cursor.error(
            f"type {IK_TENSOR_TYPES[number]} (id {number}) is ik_llama.cpp's, which runs there "
            "alone; fetch the model in a type of llama.cpp, such as IQ2_M, IQ4_XS or Q4_K_M"
        )
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.error(
            f"unknown tensor type id {number}; the file is damaged or of a newer format"
        )
    if shape[0] % kind.block_size:
        raise cursor.error(
            f"rows of {shape[0]} values do not divide into {kind.name} blocks of {kind.block_size}"
        )
    n_bytes = n_values // kind.block_size * kind.block_bytes
    return kind.name, shape, n_bytes, cursor.u64("the data offset")


def _place_tensors(
    entries: dict[str, tuple[str, tuple[int, ...], int, int]],
    data_offset: int,
    alignment: int,
    file_bytes: int,
) -> dict[str, TensorInfo]:
    """Checks that the data follows in order, each tensor at the next aligned offset."""
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    first_outside: TensorInfo | None = None
    for name, (type_name, shape, n_bytes, offset) in entries.items():
        if offset != expected:
            problem = (
                f"is not a multiple of the alignment {alignment}"
                if offset % alignment
                else f"overlaps the tensor before it, which ends at {expected}"
                if offset < expected
                else f"leaves a gap after the tensor before it, which ends at {expected}"
            )
            raise FormatError(
                f"tensor {quote(name)}: data offset {offset} {problem}; the file is damaged"
            )
        info = TensorInfo(name, type_name, shape, n_bytes, data_offset + offset)
        tensors[name] = info
        if first_outside is None and info.offset + n_bytes > file_bytes:
            first_outside = info
        expected = _align_up(offset + n_bytes, alignment)
    if first_outside is not None:
        last = info.offset + info.n_bytes
        raise FormatError(
            f"tensor {quote(first_outside.name)} ({first_outside.n_bytes} bytes at byte "
            f"{first_outside.offset}) reaches beyond the end of the file: {last - file_bytes} of "
            f"{last} bytes are missing; the download is incomplete, fetch it again"
        )
    return tensors


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
