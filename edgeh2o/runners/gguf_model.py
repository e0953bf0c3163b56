"""What decoders of the CPU and of GPUs share: a GGUF file, its weights' way into the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _core
from ..errors import EdgeH2OError, FormatError, ResourceError
from ..formats.fingerprint import fingerprint_file
from ..formats.gguf import GgufFile, TensorInfo
from ..formats.metadata import TEMPLATE_KEY, TOOL_TEMPLATE_KEY
from ..formats.split import open_model_file
from ..models.reader import read_model
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .tensor_checks import check_tensor
from .weight_loading import OnBytes, Reader, WeightLoading, mapped_bytes, readers_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..formats.model_tensors import ModelTensors
    from ..models.tensors import TensorBinding
    from ..tokenizer import Tokenizer


class GgufModelFile:
    """An opened GGUF file whose hyperparameters and tensor list were found good; no weights read.

    Raises FormatError for a file that cannot be run, ResourceError for one that cannot be read, and
    UsageError for a ``rope`` that the model cannot have. Use it as a context manager: it holds the
    file open until the weights are loaded. ``opened`` is the file of ``path`` where it is open
    already, which is then closed with this, and if it is refused.
    """

    def __init__(
        self, path: Path, rope: RopeConfig = ROPE_OF_FILE, opened: GgufFile | None = None
    ) -> None:
        self._gguf = self._open(path) if opened is None else opened
        try:
            self.config, self._bindings = read_model(self._gguf, rope)
        except BaseException:
            self._gguf.close()
            raise
        self.path = path
        sizes = [binding.held_bytes for binding in self._bindings]
        self.n_weight_bytes, self.n_mapped_bytes = sum(sizes), mapped_bytes(sizes)

    def _open(self, path: Path) -> ModelTensors:
        return open_model_file(path)

    def _readers(
        self, core_model: _core.Model | _core.DeviceModel, bindings: Sequence[TensorBinding]
    ) -> Sequence[tuple[Path, Reader]]:
        """What packs ``bindings``, by the file that it reads."""
        assert isinstance(self._gguf, GgufFile)
        return readers_of(core_model, self._gguf, bindings)

    def _start_loading(
        self, core_model: _core.Model | _core.DeviceModel, bindings: Sequence[TensorBinding]
    ) -> WeightLoading:
        n_bytes = sum(binding.n_bytes for binding in bindings)
        return WeightLoading(self._readers(core_model, bindings), n_bytes)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file describes. Raises FormatError for one that is malformed."""
        from ..tokenizer import build_tokenizer

        try:
            return build_tokenizer(self._gguf.metadata)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None

    @property
    def chat_template(self) -> object:
        """As in the file, unchecked."""
        return self._gguf.metadata.get(TEMPLATE_KEY)

    @property
    def tool_template(self) -> object:
        """As in the file, unchecked."""
        return self._gguf.metadata.get(TOOL_TEMPLATE_KEY)

    @property
    def fingerprint(self) -> str:
        """As that of the loaded model."""
        return fingerprint_file(self._gguf, self.tensors)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Those that weights are read from, each once."""
        return tuple({binding.info.name: binding.info for binding in self._bindings}.values())

    def duplicate(self) -> ModelTensors:
        """The file, open on its own."""
        return self._gguf.duplicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._gguf.close()

    def _read_weights(
        self,
        core_model: _core.Model | _core.DeviceModel,
        *,
        check_tensors: bool,
        on_bytes: OnBytes | None,
        meanwhile: Callable[[], None] | None,
        bindings: Sequence[TensorBinding] | None = None,
    ) -> Tokenizer:
        """Fills the model of the core, and builds the tokenizer meanwhile; see ``load``.

        ``bindings`` are those that are not there yet, by default all.
        """
        loading = self._start_loading(core_model, self._bindings if bindings is None else bindings)
        if on_bytes is not None:
            on_bytes(0, loading.n_bytes)
        try:
            if check_tensors:
                for info in self.tensors:
                    check_tensor(info, self._gguf.tensor_bytes(info))
            with loading:
                if meanwhile is not None:
                    meanwhile()
                tokenizer = self.tokenizer
                loading.wait(on_bytes)
            core_model.finish()
        except EdgeH2OError:  # it names its cause, and may be a ValueError too
            raise
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}") from None
        except MemoryError:
            raise ResourceError(
                f"{self.path}: out of memory after {loading.n_bytes_done} of "
                f"{loading.n_bytes} bytes of weights; use a smaller model or a stronger "
                "quantisation"
            ) from None
        return tokenizer


class GgufModel:
    """What is known of a model besides its weights, and the tokenizer of the same file."""

    def __init__(self, file: GgufModelFile, tokenizer: Tokenizer) -> None:
        self.config = file.config
        self.tokenizer = tokenizer
        self.chat_template = file.chat_template  # as in the file, unchecked
        self.tool_template = file.tool_template
        self._file, self._tensors = file.duplicate(), file.tensors

    @cached_property
    def fingerprint(self) -> str:
        """Tells model files apart; see ``fingerprint_file``. Read from the file that is open still.

        Only session files need it, and it takes as long as 12 ms. Raises FormatError and
        ResourceError for a file that cannot be read any more.
        """
        return fingerprint_file(self._file, self._tensors)

    @cached_property
    def rank_weights(self) -> dict[str, NDArray[np.float32]]:
        """What makes logits of labels of a hidden row, [rows, cols] each, by name.

        Read from the file that is open still, where ``config.ranking`` says that it has them.
        Raises FormatError and ResourceError for a file that cannot be read any more.
        """
        ranking = self.config.ranking
        return {name: self._dequantize(name) for name in (ranking.tensors if ranking else ())}

    @cached_property
    def dense_weights(self) -> list[NDArray[np.float32]]:
        """What vectors are multiplied with, [rows, cols] each; see ``config.dense_modules``.

        Raises FormatError and ResourceError for a file that cannot be read any more.
        """
        return [self._dequantize(name) for name in self.config.dense_modules]

    def _dequantize(self, name: str) -> NDArray[np.float32]:
        from .. import _kernels

        info = self._file.tensors[name]
        data, isa = self._file.tensor_bytes(info), _core.active_isa()
        rows = _kernels.Weights(isa, info.type_name, data, info.rows, info.cols)
        return rows.dequantize()
