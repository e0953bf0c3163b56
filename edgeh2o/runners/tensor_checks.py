"""Weights that are no numbers: a damaged file, or one that was converted wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from ..errors import FormatError
from ..formats.gguf_types import TENSOR_TYPES
from ..formats.metadata import quote
from ..models.tensors import readable_types

if TYPE_CHECKING:
    from ..formats.gguf import TensorInfo
    from ..formats.model_tensors import ModelTensors


def check_tensors(file: ModelTensors) -> None:
    """Raises FormatError that names the first tensor with a weight that is NaN or infinite.

    Tensors of a type that cannot be run are passed over.
    """
    supported = readable_types()
    for info in file.tensors.values():
        if info.type_name in supported:
            data = file.tensor_bytes(info)
            try:
                check_tensor(info, data)
            except ValueError as error:
                raise FormatError(f"{file.path}: {error}") from None


def check_tensor(info: TensorInfo, data: memoryview) -> None:
    bad = _core.find_bad_block(data, info.type_name)
    if bad is None:
        return
    block_size = next(t.block_size for t in TENSOR_TYPES.values() if t.name == info.type_name)
    row, block = divmod(bad, info.cols // block_size)
    raise ValueError(
        f"tensor {quote(info.name)} has a NaN or infinite weight in row {row}, block {block} of "
        f"type {info.type_name}; the file is damaged or was converted wrongly, fetch it again"
    )
