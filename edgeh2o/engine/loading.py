"""Loads a model, once it is clear that it can be run with the memory there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..attention.base import SparseAttentionConfig
from ..config import PrefillConfig, RuntimeConfig
from .session import MIN_DEFAULT_CONTEXT, plan_shape, require_fit, warn_beyond_training

if TYPE_CHECKING:
    from .opening import LoadedModel


def load_model(
    path: Path,
    *,
    attention: SparseAttentionConfig,
    prefill: PrefillConfig,
    runtime: RuntimeConfig,
    on_bytes: Callable[[int, int], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> LoadedModel:
    """The weights of a model file or folder, and its tokenizer.

    The context that ``runtime`` asks for, or the least of a prompt, must fit in memory with the
    weights. ``on_bytes(done, total)`` counts bytes of the file; ``meanwhile()`` is called while
    other threads read the weights. Raises FormatError for a bad file,
    UsageError for options that do not fit the model, ResourceError before anything large is
    allocated.
    """
    from .opening import open_model

    with open_model(path) as file:
        trained = file.config.context_length
        least_context = min(MIN_DEFAULT_CONTEXT, trained)
        if runtime.context_size is not None:
            least_context = runtime.context_size or trained
        require_fit(
            plan_shape(least_context, attention, prefill, runtime),
            lambda shape: file.estimate_session_bytes(attention, shape),
            weight_bytes=file.n_weight_bytes,
        )
        warn_beyond_training(runtime.context_size, trained)
        return file.load(
            check_tensors=runtime.check_tensors, on_bytes=on_bytes, meanwhile=meanwhile
        )
