"""Kernels as functions of arrays: what the package itself uses. Tests and benchmarks use all."""

import numpy as np
from numpy.typing import NDArray

def gemm_f32(isa: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """a [m][k] times b [k][n] on the calling thread, with the kernels of ``isa``."""
