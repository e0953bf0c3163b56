"""Safetensors files: bounded header parsing, tensor data by positioned reads.

A file is a header length of 64 bits, a JSON object (name -> dtype, shape, data_offsets), and the
bytes of the tensors without gaps. Everything in it is untrusted: sizes are Python integers, the
ranges of tensors are checked against each other and against the file before anything is read.
"""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from ..errors import FormatError, ResourceError, UsageError
from .metadata import quote
from .model_folder import ADAPTER_CONFIG, read_json
from .open_file import OpenFile, open_regular_file

MAX_HEADER_BYTES = 64 * 2**20
MAX_TENSORS = 2**18
MAX_DIMS = 8
MAX_TENSOR_VALUES = 2**62
MAX_SHARDS = 10_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
GENAI_CONFIG = "genai_config.json"  # of onnxruntime-genai

_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
_CURE = "the file is damaged or was made to do harm; fetch the model again from its publisher"

# Bits of a value, by dtype.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: ``shape`` rows first, ``offset`` in bytes from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@final
class SafetensorsFile(OpenFile):
    """An open file. Use ``open_safetensors`` to make one; usable as a context manager."""

    __slots__ = ("tensors",)

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self.tensors: dict[str, StoredTensor] = {}

    def duplicate(self) -> SafetensorsFile:
        """The same file with a descriptor of its own."""
        copy = SafetensorsFile(self.path, os.dup(self.fileno()))
        copy.tensors = self.tensors
        return copy


def name_path(path: Path, error: FormatError) -> FormatError:
    """The error with a message that begins with ``path``."""
    message = str(error)
    return FormatError(message if message.startswith(str(path)) else f"{path}: {message}")


def open_safetensors(path: Path) -> SafetensorsFile:
    """Opens a file and reads its header.

    Raises ``ResourceError`` if it cannot be read and ``FormatError`` if it is malformed; the
    message names the file, the tensor, and the cure.
    """
    cure = "fetch this file of the model again, in its place"
    file = SafetensorsFile(path, open_regular_file(path, cure))
    try:
        file.tensors = _read_header(file, os.fstat(file.fileno()).st_size)
    except FormatError as error:
        file.close()
        raise name_path(path, error) from None
    except BaseException:
        file.close()
        raise
    return file


def open_folder(folder: Path) -> list[SafetensorsFile]:
    """Opens all files of the model in a folder: those of its index, else the one or its parts.

    Raises as ``open_safetensors``, FormatError for an index or parts that do not fit together,
    UsageError where it is left open which file is meant.
    """
    index = folder / INDEX_NAME
    expected = _read_index(index) if index.is_file() else None
    names = sorted(set(expected.values())) if expected is not None else _find_files(folder)
    files: list[SafetensorsFile] = []
    try:
        for name in names:
            if expected is not None and not (folder / name).exists():
                raise FormatError(f"{folder / name}: this file of the model is missing; fetch it")
            files.append(open_safetensors(folder / name))
        _check_shards(files, expected)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def is_safetensors_folder(path: Path) -> bool:
    """Whether a path is a folder whose model is its safetensors.

    As they are what transformers loads of a folder that has exports to ONNX too; one that was
    written for onnxruntime-genai is not.
    """
    names = _names(path)
    return GENAI_CONFIG not in names and any(name.endswith(SUFFIX) for name in names)


def refuse_adapter(path: Path) -> None:
    """Raises FormatError for a folder of an adapter of PEFT, without the model."""
    names = _names(path)
    weights = [name for name in names if name.endswith((SUFFIX, ".onnx")) or name == "onnx"]
    if ADAPTER_CONFIG in names and all(name.startswith("adapter_") for name in weights):
        raise FormatError(f"{path}: it is an adapter of PEFT; name its model, and this with --lora")


def is_onnx_folder(path: Path) -> bool:
    """Whether a path is a folder whose model is an ONNX model."""
    names = _names(path)
    has_onnx = any(name in (GENAI_CONFIG, "onnx") or name.endswith(".onnx") for name in names)
    return has_onnx and not is_safetensors_folder(path)


def is_onnx_model(path: Path) -> bool:
    """Whether a path is such a folder, or is called like an ONNX file."""
    return path.suffix == ".onnx" or is_onnx_folder(path)


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing if it is none, or cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_files(folder: Path) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError as error:
        raise ResourceError(f"{folder} cannot be read: {error.strerror}") from None
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    parts = [match for name in names if (match := _SHARD.fullmatch(name))]
    if len(parts) == len(names) and len({(part["stem"], part["count"]) for part in parts}) == 1:
        count = int(parts[0]["count"])
        missing = set(range(1, count + 1)) - {int(part["number"]) for part in parts}
        if missing:
            raise FormatError(
                f"{folder}: part {min(missing)} of {count} of the model is missing; fetch it"
            )
        return names
    if len(names) == 1:
        return names
    raise UsageError(
        f"{folder} holds several safetensors files ({', '.join(map(quote, names[:4]))}) and no "
        f"{INDEX_NAME}; fetch that file too, or keep the files of one model in the folder"
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path} has no weight_map; fetch it again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(SUFFIX)
            or any(mark in file for mark in ("/", "\\", "\0"))
        ):
            raise FormatError(
                f"{path}: tensor {quote(name)} lies in {quote(str(file))}, which is not the name "
                f"of a safetensors file of the folder; {_CURE}"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise FormatError(f"{path} names more than {MAX_SHARDS} files; {_CURE}")
    return weight_map


def _check_shards(files: list[SafetensorsFile], expected: dict[str, str] | None) -> None:
    found: dict[str, str] = {}
    for file in files:
        for name in file.tensors:
            if name in found:
                raise FormatError(
                    f"{file.path}: tensor {quote(name)} is in {found[name]} too; keep the files of "
                    "one model in the folder"
                )
            found[name] = file.path.name
    for name, place in (expected or {}).items():
        if found.get(name) != place:
            raise FormatError(
                f"{INDEX_NAME} says that tensor {quote(name)} is in {place}, which does not have "
                "it; the files belong to different versions of the model, fetch all again"
            )


def _read_header(file: SafetensorsFile, file_bytes: int) -> dict[str, StoredTensor]:
    if file_bytes < _LENGTH.size:
        raise FormatError(f"has {file_bytes} bytes, too few for a safetensors file; fetch it again")
    start = file.read(0, min(file_bytes, 64))
    if start.startswith(b"version https://git-lfs"):
        raise FormatError("a Git LFS pointer, not the weights; run 'git lfs pull'")
    length = int(_LENGTH.unpack_from(start)[0])
    if length > MAX_HEADER_BYTES or start[8:9] != b"{":
        raise FormatError(f"this is no safetensors file, or one of a header too long; {_CURE}")
    if length > file_bytes - _LENGTH.size:
        raise FormatError(
            f"the header takes {length} bytes, but the file has {file_bytes - _LENGTH.size} left; "
            "it is truncated, fetch it again"
        )
    entries = _parse(file.read(_LENGTH.size, length))
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise FormatError(f"has {len(entries)} tensors, at most {MAX_TENSORS} are read; {_CURE}")
    data_offset = _LENGTH.size + length
    tensors = {name: _read_entry(name, entry) for name, entry in entries.items()}
    end = 0
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.n_bytes)):
        if tensor.offset != end:
            what = "overlaps the tensor" if tensor.offset < end else "leaves a gap after what is"
            raise FormatError(
                f"tensor {quote(tensor.name)} begins at {tensor.offset} and {what} before it, "
                f"which ends at {end}; {_CURE}"
            )
        end = tensor.offset + tensor.n_bytes
    if end != file_bytes - data_offset:
        kind = "incomplete" if end > file_bytes - data_offset else "longer than its tensors"
        raise FormatError(
            f"the tensors take {end} bytes and the file has {file_bytes - data_offset} for them: "
            f"it is {kind}, fetch it again"
        )
    return {
        name: replace(tensor, offset=data_offset + tensor.offset)
        for name, tensor in tensors.items()
    }


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise FormatError(f"a name appears twice in the header; {_CURE}")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:  # a ValueError too
        raise
    except (ValueError, RecursionError):
        raise FormatError(f"the header is not JSON; {_CURE}") from None
    if not isinstance(header, dict):
        raise FormatError(f"the header is no JSON object; {_CURE}")
    return header


def _read_entry(name: str, entry: object) -> StoredTensor:
    """The tensor, with its offset in the data as the header has it."""
    fields = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    ends: Any = fields.get("data_offsets")
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if not name or bits is None:
        raise FormatError(
            f"tensor {quote(name)} has dtype {quote(str(dtype))}, which is not known; "
            "the file is damaged or of a newer format"
        )
    if not _is_count_list(shape) or len(shape) > MAX_DIMS:
        raise FormatError(f"tensor {quote(name)} has shape {quote(str(shape))}; {_CURE}")
    if not _is_count_list(ends) or len(ends) != 2:
        raise FormatError(f"tensor {quote(name)} has offsets {quote(str(ends))}; {_CURE}")
    n_values = 1
    for size in shape:
        n_values *= size
        if n_values > MAX_TENSOR_VALUES:
            raise FormatError(f"tensor {quote(name)} has more values than any file; {_CURE}")
    n_bytes = n_values * bits // 8
    if n_values * bits % 8 or ends[1] - ends[0] != n_bytes:
        raise FormatError(
            f"tensor {quote(name)} takes {n_bytes} bytes by its shape and type, but {ends[0]} to "
            f"{ends[1]} in the file; {_CURE}"
        )
    return StoredTensor(name, str(dtype), tuple(shape), ends[0], n_bytes)


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_TENSOR_VALUES for item in value
    )
