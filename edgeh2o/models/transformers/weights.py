"""A folder of safetensors as the GGUF file that it could be, converted as it is read.

Two differences are not of names: in some architectures GGUF has pairs of rotated rows as
neighbours, and norm weights of Gemma have their 1 added.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ... import _core
from ...errors import FormatError
from ...formats.gguf_header import TensorInfo
from ...formats.gguf_types import stored_bytes
from ...formats.metadata import Metadata, quote
from ...formats.model_folder import read_json
from ...formats.safetensors import SafetensorsFile, StoredTensor, open_folder
from ...model_config import LayerConfig
from ..experts import MAX_EXPERTS
from ..rope import half_split_row_order
from ..tensors import expand_rules
from ..written_types import choose_type
from .config import DescribedFolder, describe_config
from .families import TransformersFamily

CONFIG_NAME = "config.json"
# What is read and converted at a time.
PIECE_BYTES = 16 * 2**20
_WEIGHT_TYPES = ("F32", "F16", "BF16")
# Buffers that old checkpoints keep; they follow from the settings.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

# Families here have layers of one kind, which attend; their sizes are checked later.
_LAYER = LayerConfig(n_heads=1, n_kv_heads=1, ffn_dim=1)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Where a tensor comes from: stored ones, one after the other, or ``table``.

    ``row_order[i]`` is the stored row that becomes row i; None for as they are.
    """

    sources: tuple[StoredTensor, ...]
    row_order: array[int] | None = None
    adds_one: bool = False
    table: bytes = b""


@final
class ConvertedFolder:
    """The model of a folder with the interface of an opened GGUF file; a context manager."""

    def __init__(
        self,
        path: Path,
        files: Sequence[SafetensorsFile],
        metadata: Metadata,
        tensors: dict[str, TensorInfo],
        conversions: Mapping[str, _Conversion],
    ) -> None:
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._files, self._conversions = list(files), conversions
        self._owners = {name: file for file in files for name in file.tensors}

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
        for source in conversion.sources:
            n_rows = info.rows // len(conversion.sources)
            row_bytes = source.n_bytes // n_rows
            step = n_rows if conversion.row_order else max(PIECE_BYTES // row_bytes, 1)
            for first in range(0, n_rows, step):
                count = min(step, n_rows - first)
                data = self._read(source, first * row_bytes, count * row_bytes)
                if conversion.row_order:
                    data = _reorder(data, conversion.row_order)
                if conversion.adds_one:
                    data = _add_one(data, source.dtype)
                dtype = "F32" if conversion.adds_one else source.dtype
                piece = self._convert(source, data, dtype, info, count, first)
                out[end : end + len(piece)] = piece
                end += len(piece)
        return memoryview(out)

    def _convert(
        self,
        source: StoredTensor,
        data: bytes,
        dtype: str,
        info: TensorInfo,
        n_rows: int,
        first_row: int,
    ) -> bytes:
        piece, bad = _core.convert_rows(data, dtype, info.type_name, n_rows, info.cols)
        if bad is not None:
            raise FormatError(
                f"{self._owners[source.name].path}: tensor {quote(source.name)} has a weight in "
                f"row {first_row + bad} that is NaN, infinite or too large for {info.type_name}; "
                "the file is damaged, fetch it again, or take another type"
            )
        return piece

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last bytes of a tensor as they are stored, ``n_bytes`` or fewer."""
        conversion = self._conversions[info.name]
        if conversion.table:
            table = memoryview(conversion.table)
            return table[:n_bytes], table[-n_bytes:]
        first, last = conversion.sources[0], conversion.sources[-1]
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
        return ConvertedFolder(self.path, files, self.metadata, self.tensors, self._conversions)

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
            infos, conversions = _convert_tensors(described, files, target)
        except FormatError as error:
            message = str(error)
            raise FormatError(message if str(path) in message else f"{path}: {message}") from None
        opened.pop_all()
        return ConvertedFolder(path, files, described.metadata, infos, conversions)


def _convert_tensors(
    described: DescribedFolder, files: Sequence[SafetensorsFile], target: str
) -> tuple[dict[str, TensorInfo], dict[str, _Conversion]]:
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    ties = described.ties if described.ties is not None else "lm_head.weight" not in stored
    if ties:
        stored.pop("lm_head.weight", None)
    prefix, metadata = described.spec.name, described.metadata
    n_layers = metadata.get_int(f"{prefix}.block_count")
    n_experts = metadata.get_int(f"{prefix}.expert_count", default=1, maximum=MAX_EXPERTS)
    is_interleaved = described.spec.qk_row_order == "interleaved"
    halves_to_neighbours = is_interleaved and described.family.has_half_split_rows
    infos: dict[str, TensorInfo] = {}
    conversions: dict[str, _Conversion] = {}
    used: set[str] = set()
    for name, (rule, layer) in expand_rules(described.spec.tensors, [_LAYER] * n_layers).items():
        names = _stored_names(described.family, name, layer, n_experts)
        found = [stored[each] for each in names if each in stored]
        if not names or len(found) < len(names):
            if (rule.required or found) and not (name == "output.weight" and ties):
                missing = next((each for each in names if each not in stored), name)
                raise FormatError(
                    f"tensor {quote(missing)} of a model of type {prefix} is missing; fetch all "
                    "files of the model"
                )
            continue
        used.update(names)
        shape = _shape(found, n_dims=len(rule.shape))
        kind = choose_type(name, shape, target, n_layers=n_layers, is_tied=ties)
        swaps = rule.rotated and halves_to_neighbours
        order = _find_row_order(metadata, prefix, found[0]) if swaps else None
        is_shifted = described.family.adds_one and len(shape) == 1
        conversions[name] = _Conversion(tuple(found), order, is_shifted)
        infos[name] = _info(name, kind, shape)
    unknown = [n for n in stored if n not in used and not n.endswith(_BUFFERS)]
    if unknown:
        raise FormatError(
            f"{len(unknown)} tensors that a model of type {prefix} does not use: "
            f"{', '.join(map(quote, unknown[:4]))}; the model is of a variant that is not "
            "supported, and leaving them out would give wrong answers"
        )
    for name, table in described.tables.items():
        conversions[name] = _Conversion((), table=table)
        infos[name] = _info(name, "F32", (len(table) // 4,))
    return infos, conversions


def _stored_names(family: TransformersFamily, name: str, layer: int, n_experts: int) -> list[str]:
    """Of one tensor, in the order of its parts; empty for one that the family does not have."""
    stem, _, suffix = name.replace(f"blk.{layer}.", "blk.{layer}.", 1).rpartition(".")
    template = family.tensors.get(stem)
    if template is None:
        return []
    experts = range(n_experts) if "{expert}" in template else range(1)
    return [f"{template.format(layer=layer, expert=expert)}.{suffix}" for expert in experts]


def _shape(found: Sequence[StoredTensor], *, n_dims: int) -> tuple[int, ...]:
    """In GGUF's order. Raises FormatError for tensors of a number that is no weight."""
    first = found[0]
    for tensor in found:
        if tensor.dtype not in _WEIGHT_TYPES:
            raise FormatError(
                f"tensor {quote(tensor.name)} is of dtype {tensor.dtype}; only "
                f"{', '.join(_WEIGHT_TYPES)} can be read, fetch the original model"
            )
        if tensor.shape != first.shape or tensor.dtype != first.dtype or not tensor.n_bytes:
            raise FormatError(
                f"tensor {quote(tensor.name)} is {tensor.dtype} of shape {list(tensor.shape)}, but "
                f"{quote(first.name)} {first.dtype} of {list(first.shape)}; the file is damaged"
            )
    shape = tuple(reversed(first.shape))
    if len(found) > 1 or n_dims == 3:
        return (*shape, len(found))
    # The gate of a shared expert is a matrix of one row there.
    return shape[:1] if n_dims == 1 and shape[1:] == (1,) else shape


def _info(name: str, kind: str, shape: tuple[int, ...]) -> TensorInfo:
    n_values = 1
    for size in shape:
        n_values *= size
    if not 1 <= len(shape) <= 4:
        raise FormatError(f"tensor {quote(name)} has {len(shape)} dimensions")
    return TensorInfo(name, kind, shape, stored_bytes(kind, n_values), 0)


def _find_row_order(metadata: Metadata, prefix: str, source: StoredTensor) -> array[int]:
    """The stored row of each row of Q or K, where halves become neighbours."""
    head_dim = metadata.get_int(f"{prefix}.attention.key_length", maximum=2**13)
    rotary_dim = metadata.get_int(f"{prefix}.rope.dimension_count", maximum=head_dim)
    n_rows = source.shape[0]
    if n_rows % head_dim or rotary_dim % 2:
        raise FormatError(
            f"tensor {quote(source.name)} has {n_rows} rows, which are no whole heads of {head_dim}"
        )
    order = array("i", bytes(4 * n_rows))
    for stored, row in enumerate(half_split_row_order(n_rows, head_dim, rotary_dim)):
        order[row] = stored
    return order


def _reorder(data: bytes, order: array[int]) -> bytes:
    import numpy as np

    rows = np.frombuffer(data, np.uint8).reshape(len(order), -1)
    return bytes(rows[np.asarray(order)].data)


def _add_one(data: bytes, dtype: str) -> bytes:
    import numpy as np

    itemsize = 4 if dtype == "F32" else 2
    floats, _ = _core.convert_rows(data, dtype, "F32", 1, len(data) // itemsize)
    return bytes((np.frombuffer(floats, "<f4") + np.float32(1)).data)
