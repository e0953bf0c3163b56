"""GGUF models on a GPU: the same file as on the CPU, with weights and caches on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import _core
from ..cuda.devices import require_memory
from ..errors import EdgeH2OError, FormatError, UsageError
from .base import SessionShape
from .native import NativeModelFile, core_config
from .weight_loading import OnBytes, WeightLoading

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..config import DecoderConfig
    from ..tokenizer import Tokenizer

# What only the CPU's decoder uses.
_CPU_SIZES = ("precision", "threads")
# Rules that go by column sums alone, or by nothing.
SUPPORTED_ATTENTION = ("dense", "h2o")


class CudaModelFile:
    """A ``NativeModelFile`` whose weights go to a GPU.

    Raises UsageError for a model that the GPU's kernels do not run.
    """

    def __init__(self, file: NativeModelFile, device: _core.Device) -> None:
        self._file, self._device = file, device
        self.config: DecoderConfig = file.config
        try:
            _core.check_device_supports(core_config(file.config))
        except ValueError as error:
            file.__exit__()
            raise UsageError(f"{file.path}: {error}") from None
        self.path = file.path
        self.n_weight_bytes, self.n_mapped_bytes = file.n_weight_bytes, file.n_mapped_bytes

    @property
    def tokenizer(self) -> Tokenizer:
        return self._file.tokenizer

    @property
    def chat_template(self) -> object:
        return self._file.chat_template

    @property
    def fingerprint(self) -> str:
        return self._file.fingerprint

    def __enter__(self) -> CudaModelFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session would take, almost all of them of the GPU."""
        return _estimate_session_bytes(self.config, attention, shape)

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: OnBytes | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> CudaModel:
        """As ``NativeModelFile.load``; one tensor at a time is held in the host's memory."""
        file = self._file
        core_model = _core.DeviceModel(core_config(self.config), self._device)
        bindings = file.bindings
        n_bytes = sum(
            core_model.estimate_bytes(item.info.type_name, item.n_rows, item.info.cols)
            for item in bindings
        )
        require_memory(self._device, n_bytes, "a model")
        core_model.expect_bytes(n_bytes)
        if check_tensors:
            file.check_tensors()
        loading = WeightLoading(core_model, file.gguf, bindings)
        if on_bytes is not None:
            on_bytes(0, self.n_weight_bytes)
        try:
            with loading:
                if meanwhile is not None:
                    meanwhile()
                tokenizer = self.tokenizer
                loading.wait(on_bytes)
            core_model.finish()
        except EdgeH2OError:
            raise
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}") from None
        return CudaModel(core_model, self, tokenizer, self._device)


class CudaModel:
    """Weights on a GPU, and the tokenizer of the same file."""

    shows_attention = False

    def __init__(
        self,
        core_model: _core.DeviceModel,
        file: CudaModelFile,
        tokenizer: Tokenizer,
        device: _core.Device,
    ) -> None:
        self._core_model, self._device = core_model, device
        self.config, self.tokenizer = file.config, tokenizer
        self.chat_template, self.fingerprint = file.chat_template, file.fingerprint

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the GPU."""
        return self._core_model.weight_bytes

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return _estimate_session_bytes(self.config, attention, shape)

    def start_session(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> _core.DeviceSequence:
        require_supported(attention)
        needed = sum(self.estimate_session_bytes(attention, shape).values())
        require_memory(self._device, needed, f"a context of {shape.max_context} positions")
        policy = attention.make_policy(self.config)
        try:
            return _core.DeviceSequence(self._core_model, policy, **_sizes(shape))
        except ValueError as error:
            raise UsageError(str(error)) from None


def require_supported(attention: SparseAttentionConfig) -> None:
    """Raises UsageError for a rule that the GPU's kernels have no part for."""
    if attention.algorithm not in SUPPORTED_ATTENTION:
        raise UsageError(
            f"the attention {attention.algorithm} does not run on a GPU yet; use "
            "--attention h2o or dense, or --device cpu"
        )
    if getattr(attention, "by_values", False):
        raise UsageError(
            "h2o by values (--h2o-by-values) does not run on a GPU yet; leave it out, or use "
            "--device cpu"
        )


def _estimate_session_bytes(
    config: DecoderConfig, attention: SparseAttentionConfig, shape: SessionShape
) -> Mapping[str, int]:
    policy = attention.make_policy(config)
    try:
        return _core.DeviceSequence.estimate_bytes(core_config(config), policy, **_sizes(shape))
    except ValueError as error:
        raise UsageError(f"the model cannot be run with these options: {error}") from None


def _sizes(shape: SessionShape) -> dict[str, Any]:
    return {name: value for name, value in asdict(shape).items() if name not in _CPU_SIZES}
