"""Strings of a GGUF header: counted without being made, and made."""

from __future__ import annotations

import itertools
import random
import struct

import pytest

from edgeh2o import _core

# Where the rules of well-formed sequences change.
EDGES = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF)
LEADS = (0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF)


def stored(*pieces: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(piece)) + piece for piece in pieces)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 4])
def test_what_counts_as_utf8_is_what_python_decodes(n_bytes: int) -> None:
    for data in itertools.product(EDGES + LEADS, repeat=n_bytes):
        text = bytes(data)
        n_found, position = _core.count_strings(stored(text), 0, 1)
        assert n_found == is_utf8(text), text
        assert position == n_found * (8 + n_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_counting_stops_where_reading_does(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [
        "".join(draw.choices("a\u0120\u4e00\U0001f600", k=draw.randint(0, 9))) for _ in range(9)
    ]
    data = bytearray(b"xyz" + stored(*(piece.encode() for piece in pieces)))
    for _ in range(draw.randint(0, 3)):
        data[draw.randrange(3, len(data))] ^= 1 << draw.randrange(8)
    whole = bytes(data[: draw.randint(3, len(data))])
    texts, position = _core.read_strings(whole, 3, len(pieces))
    assert _core.count_strings(whole, 3, len(pieces)) == (len(texts), position)
    assert _core.count_strings(whole, 3, 2) == (
        min(2, len(texts)),
        _core.read_strings(whole, 3, 2)[1],
    )


def test_a_position_outside() -> None:
    with pytest.raises(ValueError, match="position 9 is outside the 8 bytes"):
        _core.count_strings(b"\0" * 8, 9, 1)
