"""The wire format of protobuf (protobuf.dev/programming-guides/encoding), read and written.

Fields come as (number, wire type, value): an integer of a varint, else the bytes as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from ..errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_CURE = "the file is damaged or cut short; fetch it again"
_SIGN, _WORD = 2**63, 2**64
_MAX_SHIFT = 63  # a varint has ten bytes at most


def read_fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of a message in order; nothing is copied. Raises FormatError if it ends early."""
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _read_varint(data, at - 1)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise FormatError(f"a field has the number {number}; {_CURE}")
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            if at < end and data[at] < 128:  # nearly all are that short
                size = data[at]
                at += 1
            else:
                size, at = _read_varint(data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise FormatError(f"a field is of wire type {kind}, which no ONNX file has; {_CURE}")
        if size > end - at:
            raise FormatError(f"a field of {size} bytes has {end - at} left; {_CURE}")
        yield number, kind, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number and the place behind it."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise FormatError(f"a number is cut off; {_CURE}")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value % _WORD, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise FormatError(f"a number has more than ten bytes; {_CURE}")


def signed(value: int) -> int:
    """An int64 as a varint holds it."""
    return value - _WORD if value >= _SIGN else value


def read_varints(data: memoryview) -> list[int]:
    """Packed varints, as int64. Raises FormatError."""
    values, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        values.append(signed(value))
    return values


def read_text(data: memoryview) -> str:
    """A string field. Raises FormatError for what is no UTF-8."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise FormatError(
            "a name in the file is not UTF-8; the file is damaged, fetch it again"
        ) from None


def varint(value: int) -> bytes:
    """An int64 on the wire."""
    value %= _WORD
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer_field(number: int, value: int) -> bytes:
    """A field that is an int64."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes | memoryview | str) -> bytes:
    """A field that is a string, bytes or a message."""
    data = value.encode() if isinstance(value, str) else value
    return b"".join((varint(number << 3 | BYTES), varint(len(data)), data))


def float_field(number: int, value: float) -> bytes:
    """A field that is a float."""
    return varint(number << 3 | FIXED32) + struct.pack("<f", value)


def packed_integers(number: int, values: Iterable[int]) -> bytes:
    """A field that is a list of int64."""
    return bytes_field(number, b"".join(map(varint, values)))
