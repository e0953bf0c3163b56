"""Model files of every kind, opened by what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..onnx.folder import is_onnx
from ..runners.base import RunnableModel, SessionShape

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..config import ModelConfig
    from ..tokenizer import Tokenizer


class LoadedModel(RunnableModel, Protocol):
    """A model with its tokenizer."""

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object:
        """As in the file, unchecked."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""


class ModelFile(Protocol):
    """An opened file that was found good; no weights read yet. A context manager."""

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""

    @property
    def n_weight_bytes(self) -> int:
        """Bytes of the weights in the file."""

    def __enter__(self) -> ModelFile: ...

    def __exit__(self, *exception: object) -> None: ...

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> LoadedModel:
        """Loads the weights; ``on_bytes(done, total)`` counts bytes of the file.

        ``meanwhile()`` is called once, while they are loaded where that goes on by itself.
        """


def open_model(path: Path) -> ModelFile:
    """Opens a GGUF file, or the folder or ``.onnx`` file of an ONNX model.

    Raises FormatError for a file that cannot be run, ResourceError for one that cannot be read,
    UsageError if packages for it are missing.
    """
    if is_onnx(path):
        from ..onnx.model import OnnxModelFile

        return OnnxModelFile(path)
    from ..runners.native import NativeModelFile

    return NativeModelFile(path)
