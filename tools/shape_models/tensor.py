"""A tensor that is to be written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: its name, its shape ([rows, cols] or [n]) and the name of its type."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def n_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        return int(np.prod(self.shape)) // block_size * block_bytes
