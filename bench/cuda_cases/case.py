"""What a case is, the sizes of a model, and operands of any values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.cuda_driver import (
    FORMATS,
    Device,
    Matrix,
    Quantised,
    Structure,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A launch, and what it must move and compute at least.

    Attributes:
        limit: "bytes", "s8", "f16" or "f32": what bounds the kernel.
        amount: bytes, or multiplications and additions.
    """

    name: str
    limit: str
    amount: float
    launch: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Those of a model of 8 billion parameters, or very small ones."""

    dim: int
    n_out: int  # of a matrix by a vector: large enough that caches do not hold it
    ffn_dim: int
    n_rows: int  # of matrix products
    n_single: int  # of what is done row by row
    context: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    copy_bytes: int
    loop: int


LARGE = Sizes(4096, 65536, 14336, 2048, 4096, 16384, 32, 8, 128, 2**30, 4096)
SMALL = Sizes(128, 64, 128, 64, 8, 192, 4, 2, 32, 4096, 2)


def put_matrix(device: Device, name: str, n_out: int, depth: int) -> tuple[Structure, int]:
    """Weights of any values in a format, and their bytes. Shapes are multiples of 64."""
    random = np.random.default_rng(0)
    shape = {"n_out": n_out, "depth": depth, "format": FORMATS.index(name)}
    if not name.startswith("q"):
        values = np.full(n_out * depth, 0.5, np.float32 if name == "f32" else np.float16)
        return Matrix(values=device.put(values), **shape), values.nbytes
    n_tiles = n_out // 16 * (depth // 64)
    values = random.integers(0, 256, n_tiles * 128 * int(name[1]), np.uint8)
    blocks = (4 if "small" in name else 2) * (2 if name.endswith("min") else 1)
    scales = np.full(n_tiles * 16 * blocks, 0.01, np.float16)
    factors = np.ones(n_out, np.float32)
    matrix = Matrix(
        values=device.put(values), scales=device.put(scales), row_factors=device.put(factors),
        n_tiles=depth // 64, **shape,
    )  # fmt: skip
    return matrix, values.nbytes + scales.nbytes + factors.nbytes


def put_rows(device: Device, n_rows: int, depth: int) -> tuple[Structure, int]:
    """Activations in 8 bits, and their bytes."""
    q = np.random.default_rng(1).integers(-127, 128, (n_rows, depth), np.int8)
    d = np.full((n_rows, depth // 32), 0.01, np.float32)
    return Quantised(q=device.put(q), d=device.put(d), padded=depth), q.nbytes + d.nbytes
