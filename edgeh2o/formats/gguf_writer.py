"""Writes GGUF files of version 3: metadata, tensor list, tensor data, as one step."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..errors import ResourceError
from .atomic_file import replacing
from .gguf_cursor import MAGIC
from .gguf_header import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, TensorInfo
from .gguf_types import SCALAR_CODES, TENSOR_TYPES, ValueType
from .metadata import StoredNumbers, StoredStrings, StoredValue

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 3
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TYPE_IDS = {item.name: number for number, item in TENSOR_TYPES.items()}
# By what NumPy calls the type, without its byte order.
_ARRAY_TYPES = {
    "u1": ValueType.UINT8, "i1": ValueType.INT8, "u2": ValueType.UINT16, "i2": ValueType.INT16,
    "u4": ValueType.UINT32, "i4": ValueType.INT32, "f4": ValueType.FLOAT32, "b1": ValueType.BOOL,
    "u8": ValueType.UINT64, "i8": ValueType.INT64, "f8": ValueType.FLOAT64,
    "B": ValueType.UINT8, "b": ValueType.INT8, "H": ValueType.UINT16, "h": ValueType.INT16,
    "I": ValueType.UINT32, "i": ValueType.INT32, "f": ValueType.FLOAT32, "?": ValueType.BOOL,
    "Q": ValueType.UINT64, "q": ValueType.INT64, "d": ValueType.FLOAT64,
}  # fmt: skip


def write_gguf(
    path: Path,
    metadata: Mapping[str, StoredValue],
    tensors: Sequence[TensorInfo],
    read: Callable[[TensorInfo], Iterable[bytes | bytearray | memoryview]],
    *,
    on_bytes: Callable[[int, int], None] | None = None,
) -> int:
    """Writes or replaces a file; returns its size in bytes.

    ``read`` gives the bytes of a tensor in pieces, ``n_bytes`` in all; offsets of ``tensors`` are
    not looked at. Numbers are stored in 32 bits where they fit.
    ``on_bytes(done, total)`` counts tensor data. A full disk or an interrupt leaves what was there
    before. Raises ResourceError if the file cannot be written, and what ``read`` raises.
    """
    offsets, end = [], 0
    for info in tensors:
        offsets.append(end)
        end = _align(end + info.n_bytes)
    header = _encode_header(metadata, tensors, offsets)
    size = len(header) + end
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise ResourceError(
                f"cannot write {path}: it takes {size / 1e6:.0f} MB and {free / 1e6:.0f} MB are "
                "free; free some space or write elsewhere"
            )
        with replacing(path) as file:
            file.write(header)
            _write_tensors(file, tensors, read, on_bytes)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror}; free some space or write elsewhere"
        ) from None
    return size


def _write_tensors(
    file: IO[bytes],
    tensors: Sequence[TensorInfo],
    read: Callable[[TensorInfo], Iterable[bytes | bytearray | memoryview]],
    on_bytes: Callable[[int, int], None] | None,
) -> None:
    done, total = 0, sum(info.n_bytes for info in tensors)
    for info in tensors:
        written = 0
        for piece in read(info):
            file.write(piece)
            written += len(piece)
            if on_bytes is not None:
                on_bytes(done + written, total)
        if written != info.n_bytes:
            raise ValueError(f"tensor {info.name} has {written} bytes, not {info.n_bytes}")
        done += written
        file.write(bytes(_align(written) - written))


def _encode_header(
    metadata: Mapping[str, StoredValue], tensors: Sequence[TensorInfo], offsets: Sequence[int]
) -> bytes:
    keys = {key: value for key, value in metadata.items() if key != ALIGNMENT_KEY}
    parts = [MAGIC, _U32.pack(VERSION), _U64.pack(len(tensors)), _U64.pack(len(keys))]
    for key, value in keys.items():
        parts += [_encode_string(key), _encode_value(value)]
    for info, offset in zip(tensors, offsets, strict=True):
        parts += [_encode_string(info.name), _U32.pack(len(info.shape))]
        parts += [_U64.pack(size) for size in info.shape]
        parts += [_U32.pack(_TYPE_IDS[info.type_name]), _U64.pack(offset)]
    header = b"".join(parts)
    return header + bytes(_align(len(header)) - len(header))


def _encode_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return _U64.pack(len(data)) + data


def _encode_value(value: StoredValue) -> bytes:
    if isinstance(value, str):
        return _U32.pack(ValueType.STRING) + _encode_string(value)
    if isinstance(value, bool):
        return _encode_scalar(ValueType.BOOL, value)
    if isinstance(value, int):
        return _encode_scalar(_integer_type(value), value)
    if isinstance(value, float):
        is_large = MAX_FLOAT32 < abs(value) < math.inf
        return _encode_scalar(ValueType.FLOAT64 if is_large else ValueType.FLOAT32, value)
    if isinstance(value, tuple):
        return _encode_array(ValueType.STRING, len(value), b"".join(map(_encode_string, value)))
    if isinstance(value, StoredStrings):
        return _encode_array(ValueType.STRING, value.count, value.items)
    if isinstance(value, StoredNumbers):
        kind = _ARRAY_TYPES[value.dtype.lstrip("<|=")]
        return _encode_array(kind, len(value.items) // SCALAR_CODES[kind].size, value.items)
    kind = _ARRAY_TYPES[value.dtype.newbyteorder("<").str.lstrip("<|")]
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return _encode_array(kind, len(value), little.tobytes())


def _integer_type(value: int) -> ValueType:
    if value < 0:
        return ValueType.INT32 if value >= -(2**31) else ValueType.INT64
    return ValueType.UINT32 if value < 2**32 else ValueType.UINT64


def _encode_scalar(kind: ValueType, value: float) -> bytes:
    return _U32.pack(kind) + SCALAR_CODES[kind].pack(value)


def _encode_array(kind: ValueType, count: int, items: bytes) -> bytes:
    return _U32.pack(ValueType.ARRAY) + _U32.pack(kind) + _U64.pack(count) + items


def _align(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
