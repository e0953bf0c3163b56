"""The layer of a GGUF file that guesses tokens ahead (MTP), beside the model of the same file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import _core
from ..errors import FormatError, ResourceError
from ..models.drafting import read_drafting_layer
from .core_config import core_config
from .weight_loading import WeightLoading, mapped_bytes, readers_of

if TYPE_CHECKING:
    from ..formats.gguf import GgufFile
    from ..model_config import DecoderConfig
    from .base import SessionShape


class DraftingLayerFile:
    """Such a layer of a file that is open, found good; no weights read yet.

    ``config`` is that of the file's model, which has one (``why_no_drafting_layer``). Raises
    FormatError for a layer that cannot be run.
    """

    def __init__(self, gguf: GgufFile, config: DecoderConfig) -> None:
        self._gguf = gguf
        self.config, self._bindings = read_drafting_layer(gguf, config)
        sizes = [binding.held_bytes for binding in self._bindings]
        self.n_weight_bytes, self.n_mapped_bytes = sum(sizes), mapped_bytes(sizes)

    def estimate_session_bytes(self, shape: SessionShape) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""
        config, policy = core_config(self.config), _core.dense_policy()
        return _core.Sequence.estimate_bytes(config, policy, **shape.sizes())

    def load(self, main: _core.Model) -> DraftingLayer:
        """Packs its own tensors; it shares embedding and output matrix with ``main``.

        Raises as ``GgufModelFile.load``.
        """
        n_bytes = sum(binding.n_bytes for binding in self._bindings)
        try:
            core_model = _core.Model(core_config(self.config), main)
            readers = readers_of(core_model, self._gguf, self._bindings)
            with WeightLoading(readers, n_bytes) as loading:
                loading.wait()
            core_model.finish()
        except MemoryError:
            raise ResourceError(
                f"{self._gguf.path}: out of memory while the layer that guesses tokens ahead was "
                "loaded; leave out --draft mtp"
            ) from None
        except ValueError as error:
            raise FormatError(f"{self._gguf.path}: {error}") from None
        return DraftingLayer(core_model, self)


class DraftingLayer:
    """The layer with its weights."""

    def __init__(self, core_model: _core.Model, file: DraftingLayerFile) -> None:
        self._core_model = core_model
        self.config = file.config
        self.estimate_session_bytes = file.estimate_session_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights in memory."""
        return self._core_model.weight_bytes

    def start_session(self, shape: SessionShape) -> _core.Sequence:
        """Allocates all that a text of ``shape.max_context`` tokens needs.

        Its calls take hidden rows beside the tokens. Raises ResourceError.
        """
        try:
            return _core.Sequence(self._core_model, _core.dense_policy(), **shape.sizes())
        except MemoryError:
            raise ResourceError(
                f"what drafts {shape.max_context} positions could not be allocated; use a smaller "
                "context (--ctx-size), or leave out --draft mtp"
            ) from None
