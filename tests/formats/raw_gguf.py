"""Writes GGUF files byte by byte, including ones that no proper writer would produce."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = 10, 11, 12
F32, F16, Q4_0 = 0, 1, 2

_CODES = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, *, length: int | None = None) -> bytes:
    """A string with its length, which ``length`` can falsify."""
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def scalar(kind: int, value: float) -> bytes:
    return struct.pack("<" + _CODES[kind], value)


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    """One metadata entry with an encoded value."""
    return text(name) + u32(kind) + payload


def array(kind: int, values: Sequence[float] | Sequence[str], *, count: int | None = None) -> bytes:
    """The payload of an array of scalars or strings; ``count`` can falsify its length."""
    items = [text(v) if isinstance(v, str) else scalar(kind, v) for v in values]
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


def tensor(name: str | bytes, shape: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """One entry of the tensor list."""
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; ``n_keys`` and ``n_tensors`` can falsify the counts of its header."""
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Shape in GGUF order, type id and stored bytes."""

    shape: tuple[int, ...]
    kind: int
    data: bytes


def f32_tensor(*shape: int, values: Sequence[float] = ()) -> RawTensor:
    """An F32 tensor of the given values, or of zeros."""
    n_values = 1
    for size in shape:
        n_values *= size
    return RawTensor(shape, F32, struct.pack(f"<{n_values}f", *(values or [0.0] * n_values)))


def gguf_of(keys: Sequence[bytes], tensors: Mapping[str, RawTensor]) -> bytes:
    """A correct file with these tensors, laid out in order."""
    entries, data = [], b""
    for name, item in tensors.items():
        entries.append(tensor(name, item.shape, item.kind, len(data)))
        data += item.data + bytes(-len(item.data) % 32)
    return gguf(keys, entries, data)
