"""The low-rank adapters (LoRA) of a model that is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..formats.fingerprint import fingerprint_file
from ..formats.lora_file import LoraFile
from ..models.lora import add_updates, bind_updates

if TYPE_CHECKING:
    from .. import _core
    from ..formats.gguf_header import TensorInfo
    from ..lora_config import LoraAdapter
    from ..models.tensors import TensorBinding


class Adapters:
    """Files of adapters, open until ``close``, that were found to fit the model.

    Raises as ``LoraFile`` and ``bind_updates``.
    """

    def __init__(
        self,
        lora: Sequence[LoraAdapter],
        bindings: Sequence[TensorBinding],
        architecture: str,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        with ExitStack() as opened:
            files = [
                (opened.enter_context(LoraFile(adapter.path)), adapter.scale) for adapter in lora
            ]
            self._updates = bind_updates(bindings, files, architecture, tensors)
            digests = [
                f"{fingerprint_file(file.file, file.file.tensors.values())}*{scale!r}"
                for file, scale in files
            ]
            self._opened = opened.pop_all()
        self.digest = "+".join(digests)
        self.rank = max((update.rank for update in self._updates), default=0)
        self.n_bytes = sum(update.n_bytes for update in self._updates)

    def add_to(self, model: _core.Model) -> None:
        """Adds them to the weights that ``model`` has. Raises as ``add_updates``."""
        add_updates(model, self._updates)

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()
