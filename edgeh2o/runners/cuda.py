"""GGUF models on a GPU: the same file as on the CPU, with weights and caches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..cuda.devices import memory_left, require_memory
from ..errors import UsageError
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .base import SessionShape
from .core_config import core_config
from .gguf_model import GgufModel, GgufModelFile
from .weight_loading import OnBytes

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..model_config import DecoderConfig
    from ..models.tensors import TensorBinding
    from ..tokenizer import Tokenizer

# What only the CPU's decoder uses.
_CPU_SIZES = ("precision", "threads")
# Parts of a session that lie in the memory of the host.
_HOST_PARTS = ("staging", "scores", "rows_for_the_rule", "recurrent_copy")


class CudaModelFile(GgufModelFile):
    """A GGUF file whose weights go to a GPU.

    Raises UsageError for a model that the GPU's kernels do not run.
    """

    def __init__(self, path: Path, device: _core.Device, rope: RopeConfig = ROPE_OF_FILE) -> None:
        super().__init__(path, rope)
        self.config = replace(self.config, has_shared_sets=True)
        self._device = device
        try:
            require_supported(self.config)
        except UsageError as error:
            self.__exit__()
            raise UsageError(f"{path}: {error}") from None
        self.n_weight_bytes = estimate_weight_bytes(self._bindings)

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session would take of the GPU and of the host."""
        return estimate_session_bytes(self.config, attention, shape)

    def device_memory_left(self) -> int | None:
        """See ``engine.models.device_memory_left``."""
        return memory_left(self._device)

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: OnBytes | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> CudaModel:
        """As ``NativeModelFile.load``; one tensor at a time is held in the host's memory."""
        core_model = _core.DeviceModel(core_config(self.config), self._device)
        require_memory(self._device, self.n_weight_bytes, "a model")
        core_model.expect_bytes(self.n_weight_bytes)
        tokenizer = self._read_weights(
            core_model, check_tensors=check_tensors, on_bytes=on_bytes, meanwhile=meanwhile
        )
        return CudaModel(core_model, self, tokenizer, self._device)


class CudaModel(GgufModel):
    """Weights on a GPU."""

    shows_attention = False

    def __init__(
        self,
        core_model: _core.DeviceModel,
        file: CudaModelFile,
        tokenizer: Tokenizer,
        device: _core.Device,
    ) -> None:
        super().__init__(file, tokenizer)
        self._core_model, self._device = core_model, device

    def device_memory_left(self) -> int | None:
        """See ``engine.models.device_memory_left``."""
        return memory_left(self._device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the GPU."""
        return self._core_model.weight_bytes

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return estimate_session_bytes(self.config, attention, shape)

    def start_session(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> _core.DeviceSequence:
        parts = on_device(self.estimate_session_bytes(attention, shape))
        what = f"a context of {shape.max_context} positions"
        require_memory(self._device, sum(parts.values()), what)
        policy = attention.make_policy(self.config)
        try:
            return _core.DeviceSequence(self._core_model, policy, **_sizes(shape))
        except ValueError as error:
            raise UsageError(str(error)) from None


def require_supported(config: DecoderConfig) -> None:
    """Raises UsageError for a model that the GPU's kernels have a part missing for."""
    try:
        _core.check_device_supports(core_config(config))
    except ValueError as error:
        raise UsageError(str(error)) from None


def estimate_weight_bytes(bindings: Iterable[TensorBinding]) -> int:
    """What the weights take in the formats of the GPU."""
    return sum(
        _core.DeviceModel.estimate_bytes(item.packed_type, item.n_rows, item.info.cols)
        for item in bindings
    )


def estimate_session_bytes(
    config: DecoderConfig, attention: SparseAttentionConfig, shape: SessionShape
) -> Mapping[str, int]:
    """Bytes by purpose that a session would take of the GPU and of the host.

    Raises UsageError for a shape that this model cannot have.
    """
    policy = attention.make_policy(config)
    try:
        return _core.DeviceSequence.estimate_bytes(core_config(config), policy, **_sizes(shape))
    except ValueError as error:
        raise UsageError(f"the model cannot be run with these options: {error}") from None


def on_device(parts: Mapping[str, int]) -> dict[str, int]:
    """Those parts of a session that lie in the memory of the GPU."""
    return {name: size for name, size in parts.items() if name not in _HOST_PARTS}


def on_host(parts: Mapping[str, int]) -> dict[str, int]:
    """The other parts."""
    return {name: size for name, size in parts.items() if name in _HOST_PARTS}


def _sizes(shape: SessionShape) -> dict[str, Any]:
    return {name: value for name, value in shape.sizes().items() if name not in _CPU_SIZES}
