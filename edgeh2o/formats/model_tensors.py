"""What the reading of a model needs of its file, be it GGUF or converted as it is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .gguf_header import TensorInfo
    from .metadata import Metadata


class ModelTensors(Protocol):
    """Metadata and tensors in the words of GGUF."""

    path: Path

    @property
    def metadata(self) -> Metadata: ...

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def tensor_bytes(self, info: TensorInfo) -> memoryview:
        """The bytes of a tensor in its type, ``info.n_bytes`` long."""

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last stored bytes of a tensor, ``n_bytes`` or fewer."""

    def duplicate(self) -> ModelTensors:
        """The same file, open on its own."""

    def close(self) -> None: ...
