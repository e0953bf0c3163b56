"""Folders of LoRA adapters as PEFT saves them: adapter_config.json and safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import FormatError
from ...formats.fingerprint import fingerprint_tensors
from ...formats.gguf_header import TensorInfo
from ...formats.lora_file import read_floats
from ...formats.metadata import quote
from ...formats.model_folder import ADAPTER_CONFIG, read_json
from ...formats.safetensors import SafetensorsFile, StoredTensor, open_safetensors
from ..lora import MERGE
from .conversions import WEIGHT_TYPES
from .peft_config import PeftConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
# Raw state dicts have the name of the adapter too.
_PREFIX = "base_model.model."
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# What the update of an output matrix was trained beside: PEFT saves it too, as the model has it.
_FROZEN = re.compile(r"(?P<module>.+)\.base_layer\.(?:weight|bias)")
# What else may be in a file, and what it is.
_OTHERS: Mapping[str, str] = {
    ".lora_embedding_": "an update of an embedding",
    ".lora_magnitude_vector": "a magnitude of DoRA",
    ".lora_B.bias": "a bias of an update (lora_bias)",
    ".lora_B.default.bias": "a bias of an update (lora_bias)",
    ".bias": "a bias that was trained",
    ".trainable_tokens_": "new rows of single tokens",
    ".base_layer.": "a whole matrix of the model (save_embedding_layers)",
}


@dataclass(frozen=True, slots=True)
class PeftModule:
    """The update of a linear layer, or of a parameter that holds one matrix or several.

    ``a`` is [rank, inputs] and ``b`` [outputs, rank], however the matrix is stored. Of n matrices
    both have n times the rank: ``a`` matrix after matrix, ``b`` with all in turns.
    """

    name: str
    a: StoredTensor
    b: StoredTensor

    @property
    def rank(self) -> int:
        """Of all matrices together."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.b.shape[0], self.a.shape[1]


class PeftFolder:
    """An open folder, or the file of its tensors. A context manager.

    ``modules`` are by their names in the model that was trained; where several parameters of one
    have an update, all but the last have ``.base_layer`` behind it. Raises FormatError for what is
    malformed or not understood, ResourceError for what cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folder, weights = (path, path / WEIGHTS_NAME) if path.is_dir() else (path.parent, path)
        _check_files(path, folder, weights)
        try:
            settings = read_json(folder / ADAPTER_CONFIG)
            self.config = PeftConfig(settings)
        except FormatError as error:
            raise _named(folder, error) from None
        self._settings = settings
        self._file: SafetensorsFile = open_safetensors(weights)
        try:
            self.modules = _read_modules(self._file.tensors)
        except FormatError as error:
            self._file.close()
            raise _named(path, error) from None
        except BaseException:
            self._file.close()
            raise
        # The last two: experts, and heads of latent attention, share what others have too.
        self.read = lru_cache(2)(self._read)

    @property
    def fingerprint(self) -> str:
        """Of the settings, and of names, types, shapes and ends of the tensors.

        Raises as ``OpenFile.read``.
        """
        tensors = [
            TensorInfo(each.name, each.dtype, each.shape, each.n_bytes, each.offset)
            for each in self._file.tensors.values()
        ]
        settings = json.dumps(self._settings, sort_keys=True)
        return fingerprint_tensors(self, tensors, settings.encode())

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last bytes of a tensor, ``n_bytes`` or fewer."""
        n_bytes = min(n_bytes, info.n_bytes)
        last = info.offset + info.n_bytes - n_bytes
        return (
            memoryview(self._file.read(info.offset, n_bytes)),
            memoryview(self._file.read(last, n_bytes)),
        )

    def _read(self, tensor: StoredTensor) -> NDArray[np.float32]:
        """One of two dimensions, which must not be written to.

        Raises FormatError for NaN and infinite numbers, and as ``OpenFile.read``.
        """
        data = self._file.read(tensor.offset, tensor.n_bytes)
        rows, cols = tensor.shape
        return read_floats(self._file.path, tensor.name, data, tensor.dtype, (rows, cols))

    def close(self) -> None:
        """Closes the file, and forgets what was read last."""
        self.read.cache_clear()
        self._file.close()

    def __enter__(self) -> PeftFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _named(path: Path, error: FormatError) -> FormatError:
    message = str(error)
    return error if message.startswith(str(path)) else FormatError(f"{path}: {message}")


def _check_files(path: Path, folder: Path, weights: Path) -> None:
    """Raises FormatError that names what is missing."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise FormatError(
            f"{path}: there is no {ADAPTER_CONFIG} in the folder; name one that save_pretrained of "
            "PEFT wrote, or the GGUF file of an adapter"
        )
    if not weights.exists():
        is_pickled = (folder / PICKLE_NAME).exists()
        raise FormatError(
            f"{path}: there is no {WEIGHTS_NAME} in the folder; "
            + (
                f"{PICKLE_NAME} is a program as much as data and is not read: save the adapter "
                "with safe_serialization=True"
                if is_pickled
                else "fetch all files of the adapter"
            )
        )


def _read_modules(tensors: Mapping[str, StoredTensor]) -> dict[str, PeftModule]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    frozen: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name.removeprefix(_PREFIX))
        if match is None and _FROZEN.fullmatch(name):
            frozen[name.removeprefix(_PREFIX)] = tensor
            continue
        if match is None:
            raise FormatError(_refusal(name))
        if match["half"] in halves.setdefault(match["module"], {}):
            raise FormatError(f"tensor {quote(name)} is there twice; save one adapter alone")
        halves[match["module"]][match["half"]] = tensor
    if not halves:
        raise FormatError("it has no tensors; fetch the file again")
    modules = {name: _make_module(name, half) for name, half in halves.items()}
    for name, tensor in frozen.items():
        module = modules.get(name.rpartition(".base_layer.")[0])
        if module is None or tensor.shape not in (module.shape, module.shape[:1]):
            raise FormatError(_refusal(tensor.name))
    return modules


def _refusal(name: str) -> str:
    kinds = (kind for part, kind in _OTHERS.items() if part in name)
    what = next(kinds, "a whole tensor of the model (modules_to_save, save_embedding_layers)")
    return f"tensor {quote(name)} is {what}, which is not supported; {MERGE}"


def _make_module(name: str, half: Mapping[str, StoredTensor]) -> PeftModule:
    for letter in "AB":
        if letter not in half:
            raise FormatError(
                f"tensor lora_{letter} of module {quote(name)} is missing; fetch the file again"
            )
    a, b = half["A"], half["B"]
    for tensor in (a, b):
        if tensor.dtype not in WEIGHT_TYPES:
            raise FormatError(
                f"tensor {quote(tensor.name)} is of dtype {tensor.dtype}; only "
                f"{', '.join(WEIGHT_TYPES)} can be read, save the adapter in one of these"
            )
    if not (len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]) or not (
        a.n_bytes and b.n_bytes
    ):
        raise FormatError(
            f"tensors {quote(a.name)} and {quote(b.name)} of shape {list(a.shape)} and "
            f"{list(b.shape)} are no low-rank update of a linear layer, which is all that is "
            f"supported; {MERGE}"
        )
    return PeftModule(name, a, b)
