"""Kernels as functions of arrays: what the package itself uses. Tests and benchmarks use all."""

import numpy as np
from numpy.typing import NDArray

def gemm_f32(isa: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """a [m][k] times b [k][n] on the calling thread, with the kernels of ``isa``."""

class Weights:
    """A matrix [rows, cols] of the bytes of a GGUF tensor, packed for one instruction set."""

    def __init__(
        self, isa: str, type_name: str, data: memoryview, rows: int, cols: int
    ) -> None: ...
    def dequantize(self) -> NDArray[np.float32]:
        """The weights, [rows, cols]."""
