"""GGUF blocks as the operands of MatMulNBits and back, for the types that both have.

MatMulNBits (com.microsoft) computes (q - zero point) * scale per block of 32 inputs, with the
default zero point 2^(bits - 1); q is unsigned, two 4-bit values to a byte, the first in the low
half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 32
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: activations are rounded to 8 bits


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
    name = "Q4_0" if zero_points is None else "Q4_1"
    if bits == 8:
        name = "Q8_0"
        if zero_points is not None and not (zero_points == 0x80).all():
            return None
        zero_points = None
    sizes = {"bits": bits, "n_inputs": n_inputs, "block_size": block_size}
    blocks = _core.join_nbits_blocks(quants, scales, zero_points, **sizes)
    return None if blocks is None else (name, blocks)


def dequantize_blocks(
    quants: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[Any] | None,
    *,
    bits: int,
    n_inputs: int,
    block_size: int,
) -> NDArray[np.float32]:
    """The weights [n_outputs, n_inputs] of a MatMulNBits, whose operands are as for
    ``unpack_blocks``."""
    n_outputs, n_blocks = scales.shape
    values = _nibbles(quants) if bits == 4 else quants
    zeros: NDArray[Any] = np.full((n_outputs, n_blocks), 1 << (bits - 1), np.uint8)
    if zero_points is not None:
        packed = zero_points.reshape(n_outputs, -1)
        zeros = (_nibbles(packed) if bits == 4 else packed)[:, :n_blocks]
    blocks = values.reshape(n_outputs, n_blocks, block_size).astype(np.float32)
    blocks = (blocks - zeros[..., None]) * scales[..., None]
    return np.ascontiguousarray(blocks.reshape(n_outputs, -1)[:, :n_inputs])


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The 4-bit values of bytes, the low half first."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)
