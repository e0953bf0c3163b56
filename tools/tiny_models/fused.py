"""Matrices of a file that hold the rows of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def fuse_rows(
    tensors: dict[str, NDArray[np.float32]], prefix: str, name: str, parts: Sequence[str]
) -> None:
    """Replaces some matrices of a layer, and biases, by one that holds the rows of all."""
    for kind in ("weight", "bias"):
        if f"{prefix}{parts[0]}.{kind}" in tensors:
            rows = [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
            tensors[f"{prefix}{name}.{kind}"] = np.concatenate(rows)
