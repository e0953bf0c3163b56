"""The low-rank adapters (LoRA) of a model that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..formats.lora_file import LoraFile
from ..formats.safetensors import SUFFIX
from ..models.lora import add_updates, bind_updates, largest_rank

if TYPE_CHECKING:
    from .. import _core
    from ..formats.model_tensors import ModelTensors
    from ..lora_config import LoraAdapter
    from ..models.tensors import TensorBinding
    from ..models.transformers.adapters import ConvertedAdapter


class Adapters:
    """Files and folders of adapters, open until ``close``, that were found to fit ``model``.

    Raises as ``LoraFile``, ``open_adapter`` and ``bind_updates``.
    """

    def __init__(
        self, lora: Sequence[LoraAdapter], bindings: Sequence[TensorBinding], model: ModelTensors
    ) -> None:
        with ExitStack() as opened:
            adapters = [
                opened.enter_context(closing(_open(Path(adapter.path), model))) for adapter in lora
            ]
            self._updates = bind_updates(bindings, adapters)
            self.fingerprints = tuple(adapter.fingerprint for adapter in adapters)
            self._opened = opened.pop_all()
        self.scales = tuple(float(adapter.scale) for adapter in lora)
        self.rank = largest_rank(self._updates)
        self.n_bytes = sum(update.n_bytes for update in self._updates)

    def add_to(self, model: _core.Model) -> None:
        """Adds them to the weights that ``model`` has. Raises as ``add_updates``."""
        add_updates(model, self._updates)

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()


def _open(path: Path, model: ModelTensors) -> LoraFile | ConvertedAdapter:
    """By what it is: a folder of PEFT or its tensors, else a GGUF file."""
    if path.is_dir() or path.suffix == SUFFIX:
        from ..models.transformers.adapters import open_adapter
        from ..models.transformers.weights import ConvertedFolder

        if isinstance(model, ConvertedFolder):
            described = model.described
            return open_adapter(
                path, model.metadata, model.tensors, described.family, described.factors
            )
        return open_adapter(path, model.metadata, model.tensors)
    file = LoraFile(path)
    with ExitStack() as opened:
        opened.callback(file.close)
        file.check_fits(model.metadata.get_str("general.architecture"), model.tensors)
        opened.pop_all()
    return file
