"""A folder of safetensors as the GGUF file that it could be, converted as it is read.

Not all differences are of names: in some architectures GGUF has pairs of rotated rows as
neighbours, norm weights of Gemma have their 1 added, and ``sources.py`` has more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from ... import _core
from ...errors import FormatError
from ...formats.gguf_header import TensorInfo
from ...formats.metadata import Metadata, StoredNumbers, StoredValue, quote
from ...formats.model_folder import read_json
from ...formats.safetensors import SafetensorsFile, StoredTensor, name_path, open_folder
from .config import DescribedFolder, describe_config
from .conversions import MXFP4_BYTES, MXFP4_VALUES, WEIGHT_TYPES, Conversion, plan_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIG_NAME = "config.json"
# What is read and converted at a time.
PIECE_BYTES = 16 * 2**20


@final
class ConvertedFolder:
    """The model of a folder with the interface of an opened GGUF file; a context manager."""

    def __init__(
        self,
        path: Path,
        files: Sequence[SafetensorsFile],
        described: DescribedFolder,
        tensors: dict[str, TensorInfo],
        conversions: Mapping[str, Conversion],
    ) -> None:
        self.path, self.described, self.tensors = path, described, tensors
        self._files, self._conversions = list(files), conversions
        self._owners = {name: file for file in files for name in file.tensors}

    @property
    def metadata(self) -> Metadata:
        """That of the GGUF file that the folder could be."""
        return self.described.metadata

    def tensor_bytes(self, info: TensorInfo) -> memoryview:
        """The tensor as its type has it.

        Raises FormatError for a weight that is NaN, infinite or beyond the type, and if a file has
        become shorter; ResourceError if one cannot be read.
        """
        conversion = self._conversions[info.name]
        if conversion.table:
            return memoryview(conversion.table)
        out = bytearray(info.n_bytes)
        end = 0
        for number, stored in enumerate(conversion.stored):
            if conversion.scales:
                pieces = self._blocks(conversion, stored, conversion.scales[number])
            else:
                pieces = self._pieces(conversion, stored, info.type_name)
            for piece in pieces:
                out[end : end + len(piece)] = piece
                end += len(piece)
        return memoryview(out)

    def _pieces(
        self, conversion: Conversion, stored: StoredTensor, kind: str
    ) -> Iterator[bytes | memoryview]:
        """One stored tensor as weights of the type ``kind``, some rows or a matrix at a time."""
        n_rows, n_cols = conversion.shape
        row_bytes = stored.n_bytes // (conversion.n_matrices * n_rows)
        step = max(PIECE_BYTES // row_bytes, 1) if conversion.is_plain else n_rows
        for first in range(0, conversion.n_matrices * n_rows, step):
            count = min(step, conversion.n_matrices * n_rows - first)
            data, dtype = self._read(stored, first * row_bytes, count * row_bytes), stored.dtype
            if not conversion.is_plain:
                data = _rearrange(data, conversion)
                count, n_cols = conversion.out_shape
            if conversion.source.change != "none":
                data, dtype = _changed(data, dtype, conversion.source.change), "F32"
            if conversion.factors:
                data, dtype = _multiplied(data, dtype, conversion.factors, first, n_cols), "F32"
            piece, bad = _core.convert_rows(data, dtype, kind, count, n_cols)
            if bad is not None:
                raise FormatError(
                    f"{self._owners[stored.name].path}: tensor {quote(stored.name)} has a weight "
                    f"in row {first + bad} that is NaN, infinite or too large for {kind}; the file "
                    "is damaged, fetch it again, or take another type"
                )
            yield piece

    def _blocks(
        self, conversion: Conversion, stored: StoredTensor, scales: StoredTensor
    ) -> Iterator[bytes | memoryview]:
        """Blocks of MXFP4 as GGUF has them, a matrix at a time."""
        import numpy as np

        n_blocks = conversion.shape[0] * conversion.shape[1] // MXFP4_VALUES
        for number in range(conversion.n_matrices):
            n_bytes = n_blocks * MXFP4_BYTES
            pairs = np.frombuffer(self._read(stored, number * n_bytes, n_bytes), np.uint8)
            exponents = np.frombuffer(self._read(scales, number * n_blocks, n_blocks), np.uint8)
            # A byte has neighbours here; there the values of both halves of the block.
            halves = pairs.reshape(n_blocks, 2, -1)
            low, high = halves & 15, halves >> 4
            values = np.stack([low, high], axis=-1).reshape(n_blocks, 2, -1)
            joined = values[:, 0] | values[:, 1] << 4
            rows = np.concatenate([exponents.reshape(-1, 1), joined], axis=1)
            rows = rows.reshape(conversion.shape[0], -1)
            yield rows[np.asarray(conversion.rows)].tobytes() if conversion.rows else rows.tobytes()

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last bytes of a tensor as they are stored, ``n_bytes`` or fewer."""
        conversion = self._conversions[info.name]
        if conversion.table:
            table = memoryview(conversion.table)
            return table[:n_bytes], table[-n_bytes:]
        first, last = conversion.stored[0], conversion.stored[-1]
        return (
            memoryview(self._read(first, 0, min(n_bytes, first.n_bytes))),
            memoryview(
                self._read(last, max(last.n_bytes - n_bytes, 0), min(n_bytes, last.n_bytes))
            ),
        )

    def _read(self, source: StoredTensor, first: int, n_bytes: int) -> bytes:
        return self._owners[source.name].read(source.offset + first, n_bytes)

    def duplicate(self) -> ConvertedFolder:
        """The same model, with descriptors of its own."""
        files = [file.duplicate() for file in self._files]
        return ConvertedFolder(self.path, files, self.described, self.tensors, self._conversions)

    def close(self) -> None:
        """Closes the files; may be called again."""
        for file in self._files:
            file.close()

    def __enter__(self) -> ConvertedFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_transformers(path: Path, target: str) -> ConvertedFolder:
    """Opens a folder of config.json and safetensors; its matrices shall be of the type ``target``.

    ``target`` is one of ``config.QUANTISED_TYPES``. Raises FormatError that names the key
    or tensor which is missing, malformed or not understood, ResourceError for what cannot be read.
    """
    name = Path(os.path.abspath(path)).name
    with ExitStack() as opened:
        try:
            described = describe_config(read_json(path / CONFIG_NAME), name)
            files = [opened.enter_context(file) for file in open_folder(path)]
            described = replace(described, metadata=_with_numbers(described, files))
            infos, conversions = plan_tensors(described, files, target)
        except FormatError as error:
            raise name_path(path, error) from None
        opened.pop_all()
        return ConvertedFolder(path, files, described, infos, conversions)


def _with_numbers(described: DescribedFolder, files: Sequence[SafetensorsFile]) -> Metadata:
    """The metadata with numbers that the checkpoint has as tensors. Raises FormatError."""
    metadata = described.metadata
    n_layers = metadata.get_int(f"{described.spec.name}.block_count")
    added: dict[str, StoredValue] = {}
    for key, template in described.family.layer_numbers.items():
        numbers = []
        for layer in range(n_layers):
            name = template.format(layer=layer)
            file = next((each for each in files if name in each.tensors), None)
            if file is None:
                raise FormatError(f"tensor {quote(name)} is missing; fetch all files of the model")
            tensor = file.tensors[name]
            if tensor.dtype not in WEIGHT_TYPES or math.prod(tensor.shape) != 1:
                raise FormatError(
                    f"tensor {quote(name)} is {tensor.dtype} of shape {list(tensor.shape)}, but "
                    "must be one number; the file is damaged"
                )
            data = file.read(tensor.offset, tensor.n_bytes)
            numbers.append(_core.convert_rows(data, tensor.dtype, "F32", 1, 1)[0])
        added[key] = StoredNumbers(b"".join(numbers), "<f4")
    stored = {key: value for key in metadata if (value := metadata.stored(key)) is not None}
    return Metadata({**stored, **added})


def _rearrange(data: bytes, conversion: Conversion) -> bytes:
    """The rows and columns of a matrix that are taken, in their order."""
    import numpy as np

    n_rows, n_cols = conversion.shape
    itemsize = len(data) // (n_rows * n_cols)
    values: NDArray[np.unsignedinteger] = np.frombuffer(data, f"<u{itemsize}")
    values = values.reshape(n_rows, n_cols)
    if conversion.rows:
        values = values[np.asarray(conversion.rows)]
    if conversion.columns:
        values = values[:, np.asarray(conversion.columns)]
    return (values.T if conversion.source.is_transposed else values).tobytes()


def _changed(data: bytes, dtype: str, change: str) -> bytes:
    import numpy as np

    itemsize = 4 if dtype == "F32" else 2
    floats, _ = _core.convert_rows(data, dtype, "F32", 1, len(data) // itemsize)
    values = np.frombuffer(floats, "<f4")
    with np.errstate(over="ignore"):
        return (values + np.float32(1) if change == "add_one" else -np.exp(values)).tobytes()


def _multiplied(
    data: bytes, dtype: str, factors: Sequence[float], first_row: int, n_cols: int
) -> bytes:
    """Rows from ``first_row`` on, as F32, times their factors, or the one of all."""
    import numpy as np

    itemsize = 4 if dtype == "F32" else 2
    floats, _ = _core.convert_rows(data, dtype, "F32", 1, len(data) // itemsize)
    rows = np.frombuffer(floats, "<f4").reshape(-1, n_cols)
    own = np.asarray(factors, np.float32)
    if len(own) > 1:
        own = own[first_row : first_row + len(rows), np.newaxis]
    return (rows * own).tobytes()
