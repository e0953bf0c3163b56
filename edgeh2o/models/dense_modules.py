"""Matrices that vectors of texts are multiplied with, behind the pooling (EmbeddingGemma)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import FormatError
from ..formats.metadata import quote
from .tensors import readable_types

if TYPE_CHECKING:
    from ..formats.model_tensors import ModelTensors

DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")


def read_dense_modules(gguf: ModelTensors, model_dim: int) -> tuple[str, ...]:
    """The names of both, or none where a file has none. Raises FormatError."""
    there = [name for name in DENSE_TENSORS if name in gguf.tensors]
    if not there:
        return ()
    if len(there) < len(DENSE_TENSORS):
        lacking = next(name for name in DENSE_TENSORS if name not in there)
        raise FormatError(
            f"the file has {quote(there[0])}, but no {quote(lacking)}; convert the model anew with "
            "--sentence-transformers-dense-modules"
        )
    first, second = (gguf.tensors[name] for name in DENSE_TENSORS)
    inner = first.shape[-1]
    for info, expected in ((first, (model_dim, inner)), (second, (inner, model_dim))):
        if info.shape != expected:
            raise FormatError(
                f"tensor {quote(info.name)} has shape {list(info.shape)}, but a vector of "
                f"{model_dim} numbers makes it {list(expected)}; the file is damaged or was "
                "converted wrongly"
            )
        if info.type_name not in readable_types():
            raise FormatError(
                f"tensor {quote(info.name)} is of type {info.type_name}, which is not supported "
                "here; fetch the model in another one, such as Q8_0"
            )
    return DENSE_TENSORS
