"""Layers that draft beside a model, of a file that is open, before their weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runners.drafting_layer import DraftingLayerFile
    from .draft_sources import DraftProvider
    from .models import LoadedModel


class DraftFile:
    """The layers of ``file``: what they would take of memory, and how they are loaded.

    ``estimate_session_bytes(context)`` is what is allocated for texts of ``context`` tokens;
    ``load(model)`` makes of the loaded model beside them what drafts, and raises as
    ``DraftingLayerFile.load``.
    """

    def __init__(
        self,
        file: DraftingLayerFile,
        estimate_session_bytes: Callable[[int], int],
        load: Callable[[LoadedModel], DraftProvider],
    ) -> None:
        self.n_weight_bytes, self.n_mapped_bytes = file.n_weight_bytes, file.n_mapped_bytes
        self.estimate_session_bytes, self.load = estimate_session_bytes, load
