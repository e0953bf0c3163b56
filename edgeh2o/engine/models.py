"""What models of every kind have in common, before their weights are read and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from ..host import memory

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..model_config import ModelConfig
    from ..runners.base import Runner, SessionShape
    from ..tokenizer import Tokenizer


class DescribedModel(Protocol):
    """What is known of a model before its weights are read."""

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object:
        """As in the file, unchecked."""

    @property
    def tool_template(self) -> object:
        """The one for requests with tools, unchecked; None if there is none of its own."""

    @property
    def fingerprint(self) -> str:
        """A hash of the model file that tells models apart."""

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""


class LoadedModel(DescribedModel, Protocol):
    """A model with its weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def shows_attention(self) -> bool:
        """Whether its runners show what their attention computes, as a profile needs it."""

    def start_session(self, attention: SparseAttentionConfig, shape: SessionShape) -> Runner:
        """Allocates everything that a prompt of ``shape.max_context`` tokens needs."""


class ModelFile(DescribedModel, Protocol):
    """An opened file that was found good; no weights read yet. A context manager."""

    @property
    def n_weight_bytes(self) -> int:
        """Bytes that the weights will take: as in the file, on a GPU in its formats."""

    @property
    def n_mapped_bytes(self) -> int:
        """Addresses that they will take."""

    def __enter__(self) -> ModelFile: ...

    def __exit__(self, *exception: object) -> None: ...

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> LoadedModel:
        """Loads the weights; ``on_bytes(done, total)`` counts bytes of the file.

        ``meanwhile()`` is called once, while they are loaded where that goes on by itself; what it
        raises ends the loading.
        """


def fingerprint_at(model: DescribedModel, adapter_scales: tuple[float, ...]) -> str:
    """The fingerprint of a model in whose prompts its adapters count so much."""
    at = getattr(model, "fingerprint_at", None)
    return model.fingerprint if at is None or not adapter_scales else str(at(adapter_scales))


def may_write_later(model: LoadedModel) -> bool:
    """Whether positions of the model's sessions take no memory before they are written."""
    return bool(getattr(model, "writes_rows_later", False)) and not memory.counts_when_allocated()


def device_memory_left(model: DescribedModel) -> int | None:
    """Bytes of a GPU's own memory that are left, None where sessions take the host's alone."""
    left = getattr(model, "device_memory_left", None)
    return None if left is None else left()


def leave_on_disk(file: ModelFile, room: int) -> bool:
    """Whether weights beyond ``room`` bytes may stay on the disk; then they do."""
    leave = getattr(file, "leave_on_disk", None)
    return leave is not None and bool(leave(room))


def may_stay_on_disk(file: ModelFile) -> bool:
    """Whether weights could do so, if ``packed_weights`` said it: all addresses are there."""
    is_limited = memory.address_space_left_bytes() is not None
    return bool(getattr(file, "may_stay_on_disk", False)) and not is_limited


def mapped_weight_bytes(model: LoadedModel) -> int:
    """Bytes of the weights that lie in a file, which the system may drop and read again."""
    return int(getattr(model, "mapped_weight_bytes", 0))


def weight_sizes(model: LoadedModel) -> dict[str, int]:
    """Bytes of the weights by where they lie."""
    mapped = mapped_weight_bytes(model)
    own = {"weights": model.weight_bytes - mapped}
    return {**own, "mapped_weights": mapped} if mapped else own
