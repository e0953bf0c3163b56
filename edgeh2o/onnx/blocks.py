"""GGUF blocks as the operands of MatMulNBits and back, for the types that both have.

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
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: activations are rounded to 8 bits
HALF_MIN, HALF_MAX = 2.0**-14, 65504.0  # normal numbers in half precision


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


def unpack_blocks(
    quants: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
    *,
    bits: int,
    n_inputs: int,
    block_size: int,
) -> tuple[str, NDArray[np.uint8]] | None:
    """Name of the GGUF type and tensor data [n_outputs, bytes] of a MatMulNBits.

    ``quants`` is [n_outputs, blocks * bytes], ``scales`` [n_outputs, blocks], ``zero_points``
    packed like the quants, [n_outputs, bytes]. Scales, and with zero points their product, are
    rounded to half precision, by 2^-11 at most. None if no type has these values: blocks that are
    no multiple of 32, 8-bit zero points other than 128, scales beyond the range of normal halves.
    """
    if bits not in (4, 8) or block_size % BLOCK_SIZE or n_inputs % BLOCK_SIZE:
        return None
    size = np.abs(scales)
    if not ((size == 0) | ((size >= HALF_MIN) & (size <= HALF_MAX / 16))).all():  # also NaN
        return None
    n_outputs, n_blocks = scales.shape
    repeats, kept = block_size // BLOCK_SIZE, n_inputs // BLOCK_SIZE

    def spread(per_block: NDArray[Any]) -> NDArray[Any]:
        """From blocks of MatMulNBits to those of GGUF, as the bytes of halves."""
        spreads = np.repeat(per_block.astype("<f2"), repeats, axis=1)[:, :kept, None]
        return np.ascontiguousarray(spreads).view(np.uint8)

    values = quants[:, : n_inputs * bits // 8].reshape(n_outputs, kept, -1)
    name, packed_at = ("Q8_0", 2) if bits == 8 else ("Q4_0" if zero_points is None else "Q4_1", 2)
    if bits == 8 and zero_points is not None and not (zero_points == 0x80).all():
        return None
    if name == "Q4_1":
        packed_at = 4
    blocks = np.empty((n_outputs, kept, packed_at + values.shape[2]), np.uint8)
    blocks[..., :2] = spread(scales)
    if name == "Q8_0":
        np.bitwise_xor(values, np.uint8(0x80), out=blocks[..., 2:])
    else:
        _pair_halves(values, blocks[..., packed_at:])
    if name == "Q4_1":
        zeros = _nibbles(np.asarray(zero_points))[:, :n_blocks]
        blocks[..., 2:4] = spread(-scales * zeros)
    return name, blocks.reshape(n_outputs, -1)


def _pair_halves(values: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Blocks of 32 4-bit values whose bytes hold values 2i and 2i + 1, with i and i + 16 in them.

    Eight bytes at a time.
    """
    words = np.ascontiguousarray(values).view(np.uint64)
    first, second = words[..., 0], words[..., 1]
    low, high = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
    four = np.uint64(4)
    even = (first & low) | ((second & low) << four)
    odd = ((first & high) >> four) | (second & high)
    shape = (*values.shape[:-1], 8)
    out[..., 0::2] = even[..., None].view(np.uint8).reshape(shape)
    out[..., 1::2] = odd[..., None].view(np.uint8).reshape(shape)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The 4-bit values of bytes, the low half first."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)

