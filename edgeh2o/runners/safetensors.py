"""Folders of safetensors in the C++ decoder: weights are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..config import DEFAULT_QUANTISED_TYPE
from ..errors import FormatError
from ..formats.model_folder import read_model_settings
from ..models.transformers.weights import ConvertedFolder, open_transformers
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .native import NativeModelFile
from .weight_loading import Reader

if TYPE_CHECKING:
    from ..lora_config import LoraAdapter
    from ..models.tensors import TensorBinding
    from ..tokenizer import Tokenizer


class SafetensorsModelFile(NativeModelFile):
    """A folder of config.json, safetensors and tokenizer.json, for the decoder of the CPU.

    Matrices become ``target``, one of ``config.QUANTISED_TYPES``; ``lora`` is that of
    ``RuntimeConfig``. Raises as its base.
    """

    may_stay_on_disk = False

    def __init__(
        self,
        path: Path,
        target: str | None = None,
        rope: RopeConfig = ROPE_OF_FILE,
        *,
        lora: Sequence[LoraAdapter] = (),
    ) -> None:
        self._target = target or DEFAULT_QUANTISED_TYPE
        super().__init__(path, rope, lora=lora)

    def _open(self, path: Path) -> ConvertedFolder:
        return open_transformers(path, self._target)

    @property
    def converted(self) -> ConvertedFolder:
        """The folder in the words of GGUF."""
        assert isinstance(self._gguf, ConvertedFolder)
        return self._gguf

    def _readers(
        self, core_model: _core.Model | _core.DeviceModel, bindings: Sequence[TensorBinding]
    ) -> Sequence[tuple[Path, Reader]]:
        assert isinstance(core_model, _core.Model)
        return [(self.path, _ConvertingReader(core_model, self.converted, bindings))]

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return read_model_settings(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of tokenizer.json. Raises FormatError for one that is missing or malformed."""
        from ..tokenizer.tokenizer_json import JsonTokenizer, TokenizerSettings

        settings = self._settings
        if settings["tokenizer_json"] is None:
            raise FormatError(
                f"{self.path}: there is no tokenizer.json; fetch it from where the model came from"
            )
        try:
            return JsonTokenizer(
                settings["tokenizer_json"],
                TokenizerSettings(
                    vocab_size=self.config.vocab_size,
                    bos=settings["bos"],
                    eos=settings["eos"],
                    more_eos=settings["more_eos"],
                ),
            )
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None

    @property
    def chat_template(self) -> object:
        """As in the folder, unchecked."""
        return self._settings["chat_template"]

    @property
    def tool_template(self) -> object:
        """As in the folder, unchecked."""
        return self._settings["tool_template"]


class _ConvertingReader:
    """Converts tensors one by one and hands them to the core, as ``_core.WeightReader`` does."""

    def __init__(
        self, core_model: _core.Model, file: ConvertedFolder, bindings: Sequence[TensorBinding]
    ) -> None:
        self._core_model, self._file, self._bindings = core_model, file, bindings
        self.n_bytes_done = 0
        self._is_cancelled = False

    def run(self) -> None:
        """Raises as ``ConvertedFolder.tensor_bytes`` and ``_core.Model.set_tensor``."""
        name, data = "", memoryview(b"")
        for item in self._bindings:  # those of one tensor follow each other
            if self._is_cancelled:
                return
            if item.info.name != name:
                name, data = item.info.name, memoryview(b"")
                data = self._file.tensor_bytes(item.info)
            part = data[item.first_byte : item.first_byte + item.n_bytes]
            self._core_model.set_tensor(
                item.name, part, item.info.type_name, item.n_rows, item.info.cols, item.row_order
            )
            self.n_bytes_done += item.n_bytes

    def take_all_threads(self) -> None:
        """Nothing: conversions take as many as the process has."""

    def cancel(self) -> None:
        """``run`` ends after the tensor at hand."""
        self._is_cancelled = True
