"""Layers that guess tokens ahead beside a model: of its GGUF file (MTP), or of one of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import _core
from ..config import MTP_DRAFT
from ..errors import FormatError, ResourceError
from ..models.drafters import Drafter
from ..models.drafting import read_drafting_layer
from .core_config import core_config
from .weight_loading import WeightLoading, mapped_bytes, readers_of

if TYPE_CHECKING:
    from ..formats.gguf import GgufFile
    from ..model_config import DecoderConfig
    from .base import SessionShape


class DraftingLayerFile:
    """Such layers of a file that is open, found good; no weights read yet.

    ``name`` is what statistics call them, ``flag`` the option that asked for them.
    """

    def __init__(self, gguf: GgufFile, drafter: Drafter, *, name: str, flag: str) -> None:
        self._gguf, self.drafter, self.name, self.flag = gguf, drafter, name, flag
        self.config, self._bindings = drafter.config, drafter.bindings
        sizes = [binding.held_bytes for binding in self._bindings]
        self.n_weight_bytes, self.n_mapped_bytes = sum(sizes), mapped_bytes(sizes)

    def estimate_session_bytes(self, shape: SessionShape) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""
        config, policy = core_config(self.config), _core.dense_policy()
        return _core.Sequence.estimate_bytes(config, policy, **shape.sizes())

    def load(self, main: _core.Model) -> DraftingLayer:
        """The layers, which share with ``main`` what they have not of their own.

        Raises as ``GgufModelFile.load``.
        """
        return DraftingLayer(self.pack(main), self)

    def pack(self, main: _core.Model) -> _core.Model:
        """Packs their tensors; raises as ``load``."""
        n_bytes = sum(binding.n_bytes for binding in self._bindings)
        try:
            core_model = _core.Model(core_config(self.config), main)
            readers = readers_of(core_model, self._gguf, self._bindings)
            with WeightLoading(readers, n_bytes) as loading:
                loading.wait()
            core_model.finish()
        except MemoryError:
            raise ResourceError(
                f"{self._gguf.path}: out of memory while what guesses tokens ahead was loaded; "
                f"leave out {self.flag}"
            ) from None
        except ValueError as error:
            raise FormatError(f"{self._gguf.path}: {error}") from None
        return core_model


def own_drafting_layer(gguf: GgufFile, config: DecoderConfig) -> DraftingLayerFile:
    """The layer of a model's own file, which has one (``why_no_drafting_layer``).

    ``config`` is that of the model. Raises FormatError for a layer that cannot be run.
    """
    own, bindings = read_drafting_layer(gguf, config)
    drafter = Drafter(config=own, bindings=bindings)
    return DraftingLayerFile(gguf, drafter, name=MTP_DRAFT, flag=f"--draft {MTP_DRAFT}")


class DraftingLayer:
    """Layers with their weights."""

    def __init__(self, core_model: _core.Model, file: DraftingLayerFile) -> None:
        self._core_model = core_model
        self.config, self.drafter, self.name = file.config, file.drafter, file.name
        self._flag = file.flag
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
                f"context (--ctx-size), or leave out {self._flag}"
            ) from None


class LentLayersFile(DraftingLayerFile):
    """Of layers that attend to what their model has cached, of the configuration ``main``."""

    def __init__(
        self, gguf: GgufFile, drafter: Drafter, main: DecoderConfig, *, name: str, flag: str
    ) -> None:
        super().__init__(gguf, drafter, name=name, flag=flag)
        self._main = main

    def estimate_context_bytes(self, context: int, threads: int) -> int:
        """What is allocated for sequences of ``context`` tokens."""
        own, main = core_config(self.config), core_config(self._main)
        return _core.LentReader.estimate_bytes(own, main, context, threads)
