"""Writes a model as a GGUF file of another type, from a GGUF file or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from .. import _core
from ..config import check_quantised_type
from ..errors import FormatError, UsageError
from ..formats.gguf import GgufFile
from ..formats.gguf_header import TensorInfo
from ..formats.gguf_types import stored_bytes
from ..formats.gguf_writer import write_gguf
from ..formats.metadata import (
    TEMPLATE_KEY,
    TEMPLATE_NAMES_KEY,
    TOOL_TEMPLATE_KEY,
    TOOL_TEMPLATE_NAME,
    Metadata,
    StoredValue,
    quote,
)
from ..formats.model_folder import read_model_settings
from ..formats.safetensors import is_onnx_model, is_safetensors_folder
from ..formats.split import open_model_file
from ..models.joined import is_joined_qkv, joined_experts
from ..models.reader import OUTPUT_TENSOR, read_model
from ..models.spec import find_architecture
from ..models.tensors import expand_rules
from ..models.transformers.weights import PIECE_BYTES, ConvertedFolder, open_transformers
from ..models.written_types import FILE_TYPES, choose_type, is_kept
from ..tokenizer.gguf_vocabulary import vocabulary_metadata
from ..tokenizer.tokenizer_json import TokenizerSettings

OnBytes = Callable[[int, int], None]
_FLOAT_TYPES = ("F32", "F16", "BF16")
_SPLIT_PREFIX = "split."


def quantize_model(
    source: Path,
    target: Path,
    type_name: str,
    *,
    allow_requantize: bool = False,
    on_bytes: OnBytes | None = None,
) -> dict[str, object]:
    """Writes ``target``, in one step; returns what was written.

    ``type_name`` is one of ``config.QUANTISED_TYPES``. Matrices that are quantised already are
    only taken with ``allow_requantize``: their errors add up. ``on_bytes(done, total)`` counts the
    bytes that are written. Raises FormatError for a model that is malformed or not understood,
    UsageError for what is not allowed, ResourceError for what cannot be read or written.
    """
    type_name = check_quantised_type(type_name)
    if is_safetensors_folder(source):
        _refuse_own_file(target, [each for each in source.iterdir() if each.suffix != ".gguf"])
        with open_transformers(source, type_name) as folder:
            return _write_folder(folder, target, type_name, on_bytes)
    if is_onnx_model(source):
        raise UsageError(
            f"{source}: an ONNX model cannot be quantised; give a GGUF file or a folder of "
            "safetensors"
        )
    with open_model_file(source) as gguf:
        own = {gguf.path, *(gguf.source(info).path for info in gguf.tensors.values())}
        _refuse_own_file(target, own)
        return _write_file(gguf, target, type_name, allow_requantize, on_bytes)


def _refuse_own_file(target: Path, files: Iterable[Path]) -> None:
    """Raises UsageError for a target that is one of the model's own ``files``."""
    if target.exists() and any(each.exists() and target.samefile(each) for each in files):
        raise UsageError(f"{target}: the model cannot be written over itself; name another file")


def _write_folder(
    folder: ConvertedFolder, target: Path, type_name: str, on_bytes: OnBytes | None
) -> dict[str, object]:
    config, _ = read_model(folder)
    settings = read_model_settings(folder.path)
    if settings["tokenizer_json"] is None:
        raise FormatError(
            f"{folder.path}: there is no tokenizer.json; fetch it from where the model came from"
        )
    try:
        vocabulary = vocabulary_metadata(
            settings["tokenizer_json"],
            TokenizerSettings(
                vocab_size=config.vocab_size,
                bos=settings["bos"],
                eos=settings["eos"],
                more_eos=settings["more_eos"],
            ),
        )
    except FormatError as error:
        raise FormatError(f"{folder.path}: {error}") from None
    metadata = _stored(folder.metadata) | vocabulary
    if isinstance(settings["chat_template"], str):
        metadata[TEMPLATE_KEY] = settings["chat_template"]
    if isinstance(settings["tool_template"], str):
        metadata[TOOL_TEMPLATE_KEY] = settings["tool_template"]
        metadata[TEMPLATE_NAMES_KEY] = (TOOL_TEMPLATE_NAME,)
    tensors = list(folder.tensors.values())

    def read(info: TensorInfo) -> Iterator[memoryview]:
        yield folder.tensor_bytes(info)

    size = write_gguf(target, _typed(metadata, type_name), tensors, read, on_bytes=on_bytes)
    return _report(target, tensors, size)


def _write_file(
    gguf: GgufFile, target: Path, type_name: str, allow_requantize: bool, on_bytes: OnBytes | None
) -> dict[str, object]:
    config, _ = read_model(gguf)
    spec = find_architecture(config.architecture)
    rules = expand_rules(joined_experts(gguf.tensors, spec.all_tensors), config.own_layers)
    tensors = []
    for name, info in gguf.tensors.items():
        rule = rules[name][0] if name in rules else None
        is_vector = rule is None or rule.is_vectors or len(rule.shape) < 2 or is_kept(name)
        if is_vector and not is_joined_qkv(name, rules):
            tensors.append(info)
            continue
        kind = choose_type(
            name,
            info.shape,
            type_name,
            n_layers=len(config.own_layers),
            is_tied=OUTPUT_TENSOR not in gguf.tensors,
        )
        if not (info.type_name in (kind, *_FLOAT_TYPES) or allow_requantize):
            raise UsageError(
                f"{gguf.path}: tensor {quote(name)} is of type {info.type_name} already, and "
                f"quantising it to {kind} adds to its errors; take a file of F16 or BF16, or say "
                "--allow-requantize"
            )
        n_bytes = stored_bytes(kind, info.rows * info.cols)
        tensors.append(TensorInfo(name, kind, info.shape, n_bytes, 0))

    def read(info: TensorInfo) -> Iterator[bytes]:
        return _convert(gguf, gguf.tensors[info.name], info.type_name)

    metadata = {
        key: value
        for key, value in _stored(gguf.metadata).items()
        if not key.startswith(_SPLIT_PREFIX)
    }
    size = write_gguf(target, _typed(metadata, type_name), tensors, read, on_bytes=on_bytes)
    return _report(target, tensors, size)


def _convert(gguf: GgufFile, info: TensorInfo, kind: str) -> Iterator[bytes]:
    """The tensor as another type, a piece of its rows at a time."""
    owner = gguf.source(info)
    row_bytes = info.n_bytes // info.rows
    step = max(PIECE_BYTES // row_bytes, 1)
    for first in range(0, info.rows, step):
        count = min(step, info.rows - first)
        data = owner.read(info.offset + first * row_bytes, count * row_bytes)
        if kind == info.type_name:
            yield data
            continue
        piece, bad = _core.convert_rows(data, info.type_name, kind, count, info.cols)
        if bad is not None:
            raise FormatError(
                f"{owner.path}: tensor {quote(info.name)} has a weight in row {first + bad} that "
                f"is NaN, infinite or too large for {kind}; the file is damaged, fetch it again, "
                "or take another type"
            )
        yield piece


def _stored(metadata: Metadata) -> dict[str, StoredValue]:
    values = ((key, metadata.stored(key)) for key in metadata)
    return {key: value for key, value in values if value is not None}


def _typed(metadata: Mapping[str, StoredValue], type_name: str) -> dict[str, StoredValue]:
    own = {"general.file_type": FILE_TYPES[type_name], "general.quantization_version": 2}
    return {**metadata, **own}


def _report(target: Path, tensors: list[TensorInfo], size: int) -> dict[str, object]:
    counts: dict[str, int] = {}
    for info in tensors:
        counts[info.type_name] = counts.get(info.type_name, 0) + 1
    weights = sum(info.rows * info.cols for info in tensors)
    return {
        "file": str(target),
        "bytes": size,
        "tensors": counts,
        "bits_per_weight": round(8 * sum(info.n_bytes for info in tensors) / weights, 2),
    }
