"""Weights and activations in the layouts of cpp/cuda/kernels/arguments.h, from values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.quant import dequantise_q8_rows, quantise_q8_rows
from tools.cuda_driver import FORMATS, Device, Matrix, Quantised, Structure

PANEL, TILE = 16, 64
# Times that a kernel runs, with warps and lanes in another order each time; sanitizers are slow.
ORDERS = 2 if "sanitized" in os.environ.get("EDGEH2O_TEST_CUDA_DRIVER", "") else 3
EPS = 1e-5
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tiles:
    """Quants q [rows, depth], scales and minima [rows, depth / block], factors [rows]."""

    name: str
    bits: int
    block: int
    q: NDArray[np.int64]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None
    factors: NDArray[np.float32]

    def weights(self) -> NDArray[np.float64]:
        """[rows, depth]."""
        q = self.q - (8 if self.bits == 4 and self.minima is None else 0)
        w = q * np.repeat(self.scales.astype(np.float64), self.block, axis=1)
        if self.minima is not None:
            w += np.repeat(self.minima.astype(np.float64), self.block, axis=1)
        return w * self.factors[:, None].astype(np.float64)

    def span(self) -> NDArray[np.float64]:
        """[rows, depth]: bounds of the terms that a weight is the sum of."""
        w = np.repeat(np.abs(self.scales.astype(np.float64)), self.block, axis=1) * 2**self.bits
        if self.minima is not None:
            w += np.repeat(np.abs(self.minima.astype(np.float64)), self.block, axis=1)
        return w * self.factors[:, None].astype(np.float64)

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float32]]:
        """Quants, scales and factors in the order of memory."""
        rows, depth = self.q.shape
        n_panels, n_tiles = -(-rows // PANEL), -(-depth // TILE)
        q = np.zeros((n_panels * PANEL, n_tiles * TILE), np.int64)
        q[:rows, :depth] = self.q
        # [panel, half, output 8, tile, block 32, high, column, byte]
        parts = q.reshape(n_panels, 2, 8, n_tiles, 2, 2, 4, 4)
        if self.bits == 4:
            words = parts[:, :, :, :, :, 0] | parts[:, :, :, :, :, 1] << 4
            # -> [panel, tile, output 8, column, half, block, byte]
            packed = words.transpose(0, 3, 2, 5, 1, 4, 6)
        else:
            # -> [panel, tile, half, output 8, column, block, high, byte]
            packed = parts.transpose(0, 3, 1, 2, 6, 4, 5, 7)
        return (
            np.ascontiguousarray(packed & 0xFF).astype(np.uint8).reshape(-1),
            self._packed_scales(n_panels, n_tiles),
            np.pad(self.factors, (0, n_panels * PANEL - rows)),
        )

    def _packed_scales(self, n_panels: int, n_tiles: int) -> NDArray[np.float16]:
        blocks = TILE // self.block
        kinds = [self.scales] if self.minima is None else [self.scales, self.minima]
        packed = np.zeros((n_panels * PANEL, n_tiles * blocks, len(kinds)), np.float16)
        for i, kind in enumerate(kinds):
            packed[: kind.shape[0], : kind.shape[1], i] = kind
        # -> [panel, tile, output, kind, block]
        parts = packed.reshape(n_panels, PANEL, n_tiles, blocks, len(kinds))
        return np.ascontiguousarray(parts.transpose(0, 2, 1, 4, 3)).reshape(-1)


def random_tiles(name: str, rows: int, depth: int, *, seed: int = 0) -> Tiles:
    """Random weights of a quantised format; every stored value occurs."""
    random = np.random.default_rng(seed)
    bits, block = int(name[1]), 16 if "small" in name else 32
    low, high = (0, 16) if bits == 4 else (-128, 128)
    shape = (rows, depth // block)
    return Tiles(
        name,
        bits,
        block,
        random.integers(low, high, (rows, depth)),
        random.uniform(-2, 2, shape).astype(np.float16),
        random.uniform(-2, 2, shape).astype(np.float16) if name.endswith("min") else None,
        np.exp2(random.integers(-12, 4, rows)).astype(np.float32),
    )


def put_tiles(device: Device, tiles: Tiles) -> Structure:
    rows, depth = tiles.q.shape
    values, scales, factors = (device.put(array) for array in tiles.arrays())
    return Matrix(
        values=values,
        scales=scales,
        row_factors=factors,
        n_out=rows,
        depth=depth,
        n_tiles=-(-depth // TILE),
        format=FORMATS.index(tiles.name),
    )


def put_floats(device: Device, name: str, w: NDArray[Any]) -> tuple[Structure, NDArray[np.float64]]:
    """The matrix in f32, f16 or bf16, and its values as they are stored."""
    if name == "bf16":
        stored: NDArray[Any] = (w.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        values = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        stored = w.astype(np.float32 if name == "f32" else np.float16)
        values = stored.astype(np.float64)
    rows, depth = w.shape
    address = device.put(stored)
    matrix = Matrix(values=address, n_out=rows, depth=depth, format=FORMATS.index(name))
    return matrix, values


def put_quantised(device: Device, x: Floats) -> tuple[Structure, NDArray[np.float64]]:
    """Rows of 8 bits, padded to 64, and what they stand for."""
    depth = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -depth % 64)))
    q, d = quantise_q8_rows(padded)
    rows = Quantised(q=device.put(q), d=device.put(d), padded=padded.shape[1])
    return rows, dequantise_q8_rows(q, d)[:, :depth]


def empty_quantised(device: Device, n_rows: int, dim: int) -> Structure:
    padded = dim + -dim % 64
    q, d = device.empty(n_rows * padded), device.empty(n_rows * padded // 32 * 4)
    return Quantised(q=q, d=d, padded=padded)


def check_quantised(device: Device, got: Structure, expected: NDArray[np.float64]) -> None:
    """Within half a step of 8 bits of the values, and a little for their own rounding."""
    n_rows, dim = expected.shape
    q = device.get(got.q, (n_rows, got.padded), np.int8)
    d = device.get(got.d, (n_rows, got.padded // 32), np.float32)
    padded = np.pad(expected, ((0, 0), (0, -dim % 64)))
    steps = np.abs(padded).reshape(n_rows, -1, 32).max(-1) / 127
    np.testing.assert_allclose(d, steps, rtol=2e-5)
    error = np.abs(dequantise_q8_rows(q, d) - padded)
    assert (error <= np.repeat(steps, 32, axis=1) * 0.501 + 1e-12).all()


def normed(x: NDArray[np.floating], weight: Floats) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
