"""Plain encoders of the GGUF K-quant block formats, which the `gguf` package only decodes.

Scales come from the minimum and maximum of each sub-block, without the search for a
better fit that llama-quantize does: good for test models, not for serving.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 256
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantize_k(weights: Floats, type_name: str) -> Bytes:
    """Encodes weights [rows, cols], cols a multiple of 256, as one of K_TYPES.

    Returns:
        [rows, bytes per row] blocks.

    Raises:
        ValueError: for another type or a ragged row.
    """
    if weights.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"{type_name} needs rows of a multiple of {BLOCK_SIZE} values")
    blocks = weights.astype(np.float32).reshape(-1, BLOCK_SIZE)
    if type_name in ("Q4_K", "Q5_K"):
        encoded = _encode_with_minimum(blocks, n_bits=int(type_name[1]))
    elif type_name in K_TYPES:
        encode = {"Q2_K": _encode_q2, "Q3_K": _encode_q3, "Q6_K": _encode_q6}[type_name]
        encoded = encode(blocks)
    else:
        raise ValueError(f"{type_name} is not one of {', '.join(K_TYPES)}")
    return encoded.reshape(*weights.shape[:-1], -1)


def _half_bytes(values: Floats) -> Bytes:
    return values.astype(np.float16).view(np.uint8).reshape(len(values), 2)


def _unit(values: Floats, levels: int) -> Floats:
    """float16 scale per block such that `levels` of it reach the largest value."""
    top = values.max(axis=1) / np.float32(levels)
    return top.astype(np.float16).astype(np.float32)


def _levels(values: Floats, unit: Floats, levels: int) -> NDArray[np.int32]:
    divisor = np.where(unit > 0.0, unit, np.float32(1.0))
    return np.clip(np.rint(values / divisor), 0, levels).astype(np.int32)


def _encode_with_minimum(blocks: Floats, *, n_bits: int) -> Bytes:
    """8 sub-blocks of 32: weight = d * scale * q - dmin * minimum, 6-bit scale and minimum."""
    n_blocks = len(blocks)
    subs = blocks.reshape(n_blocks, 8, 32)
    q_max = (1 << n_bits) - 1
    low = np.maximum(-subs.min(axis=2), 0.0)
    step = (subs.max(axis=2) + low) / np.float32(q_max)
    d, d_min = _unit(step, 63), _unit(low, 63)
    scale, minimum = _levels(step, d[:, None], 63), _levels(low, d_min[:, None], 63)
    sub_step = (d[:, None] * scale)[..., None]
    shifted = subs + (d_min[:, None] * minimum)[..., None]
    q = _levels(shifted, sub_step, q_max).astype(np.uint8)

    packed = np.zeros((n_blocks, 3, 4), np.uint8)
    packed[:, 0] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    packed[:, 1] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    packed[:, 2] = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    parts = [_half_bytes(d), _half_bytes(d_min), packed.reshape(n_blocks, 12)]
    if n_bits == 5:
        bits = (q >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(bits, axis=1))
    low_bits = (q & 15).reshape(n_blocks, 4, 2, 32)
    parts.append((low_bits[:, :, 0] | low_bits[:, :, 1] << 4).reshape(n_blocks, 128))
    return np.concatenate(parts, axis=1)


def _encode_q6(blocks: Floats) -> Bytes:
    """16 sub-blocks of 16: weight = d * scale * (q - 32), signed 8-bit scale."""
    n_blocks = len(blocks)
    subs = blocks.reshape(n_blocks, 16, 16)
    step = np.abs(subs).max(axis=2) / np.float32(31.0)
    d = _unit(step, 127)
    scale = _levels(step, d[:, None], 127)
    sub_step = np.where(scale > 0, d[:, None] * scale, 1.0)[..., None]
    q = np.clip(np.rint(subs / sub_step), -32, 31).astype(np.int32) + 32
    q = q.astype(np.uint8).reshape(n_blocks, 2, 4, 32)
    low = (q & 15).reshape(n_blocks, 2, 2, 64)
    low_bytes = low[:, :, 0] | low[:, :, 1] << 4
    high = (q >> 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high_bytes = np.bitwise_or.reduce(high, axis=2)
    parts = [low_bytes.reshape(n_blocks, 128), high_bytes.reshape(n_blocks, 64)]
    return np.concatenate([*parts, scale.astype(np.uint8), _half_bytes(d)], axis=1)


def _encode_q2(blocks: Floats) -> Bytes:
    """16 sub-blocks of 16: weight = d * scale * q - dmin * minimum, 4-bit scale and minimum."""
    n_blocks = len(blocks)
    subs = blocks.reshape(n_blocks, 16, 16)
    low = np.maximum(-subs.min(axis=2), 0.0)
    step = (subs.max(axis=2) + low) / np.float32(3.0)
    d, d_min = _unit(step, 15), _unit(low, 15)
    scale, minimum = _levels(step, d[:, None], 15), _levels(low, d_min[:, None], 15)
    shifted = subs + (d_min[:, None] * minimum)[..., None]
    q = _levels(shifted, (d[:, None] * scale)[..., None], 3).astype(np.uint8)
    scales = (scale | minimum << 4).astype(np.uint8)
    return np.concatenate([scales, _pack_crumbs(q), _half_bytes(d), _half_bytes(d_min)], axis=1)


def _encode_q3(blocks: Floats) -> Bytes:
    """16 sub-blocks of 16: weight = d * (scale - 32) * (q - 4), 6-bit scale."""
    n_blocks = len(blocks)
    subs = blocks.reshape(n_blocks, 16, 16)
    step = np.abs(subs).max(axis=2) / np.float32(3.5)
    d = _unit(step, 31)
    scale = _levels(step, d[:, None], 31)
    sub_step = np.where(scale > 0, d[:, None] * scale, 1.0)[..., None]
    q = (np.clip(np.rint(subs / sub_step), -4, 3).astype(np.int32) + 4).astype(np.uint8)
    high = (q.reshape(n_blocks, 8, 32) >> 2) << np.arange(8, dtype=np.uint8)[:, None]
    stored = (scale + 32).astype(np.uint8)
    packed = np.zeros((n_blocks, 12), np.uint8)
    packed[:, :8] = (stored[:, :8] & 15) | (stored[:, 8:] & 15) << 4
    for group in range(4):
        packed[:, 8:] |= (stored[:, 4 * group : 4 * group + 4] >> 4) << (2 * group)
    masks = np.bitwise_or.reduce(high, axis=1)
    return np.concatenate([masks, _pack_crumbs(q & 3), packed, _half_bytes(d)], axis=1)


def _pack_crumbs(q: Bytes) -> Bytes:
    """The low two bits of 256 weights: four groups of 32 of each half share 32 bytes."""
    groups = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(groups, axis=2).reshape(-1, 64)
