"""GGUF blocks as the operands of MatMulNBits, for the types whose values it represents exactly.

MatMulNBits (com.microsoft) computes (q - zero point) * scale per block of 32 inputs, with the
default zero point 2^(bits - 1); q is unsigned, two 4-bit values to a byte, the first in the low
half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class BlockOperands:
    """``quants`` uint8 [rows, blocks, bytes] and ``scales`` float32 [rows, blocks]."""

    bits: int
    quants: NDArray[np.uint8]
    scales: NDArray[np.float32]


def pack_blocks(data: memoryview, type_name: str, n_rows: int) -> BlockOperands | None:
    """The operands of a matrix stored as ``type_name``; None if the type has no exact form."""
    raw = np.frombuffer(data, np.uint8).reshape(n_rows, -1)
    if type_name == "Q4_0":
        return _pack_q4_0(raw.reshape(n_rows, -1, 18))
    if type_name == "Q8_0":
        return _pack_q8_0(raw.reshape(n_rows, -1, 34))
    return None


def _scales(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    halves: NDArray[Any] = np.ascontiguousarray(blocks[..., :2]).view("<f2")
    return halves[..., 0].astype(np.float32)


def _pack_q4_0(blocks: NDArray[np.uint8]) -> BlockOperands:
    """GGUF has values i and i + 16 in one byte, MatMulNBits 2i and 2i + 1."""
    quants = blocks[..., 2:]
    values = np.concatenate([quants & 15, quants >> 4], axis=-1)
    return BlockOperands(4, values[..., 0::2] | (values[..., 1::2] << 4), _scales(blocks))


def _pack_q8_0(blocks: NDArray[np.uint8]) -> BlockOperands:
    """Signed values become unsigned ones around 128."""
    return BlockOperands(8, blocks[..., 2:] ^ np.uint8(0x80), _scales(blocks))
