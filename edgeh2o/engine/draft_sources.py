"""Where the drafts of an answer come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner, HiddenRows, Runner
    from ..sampling_config import SamplingParams
    from .drafting import CallCosts, Drafter


class DraftSource(Protocol):
    """What drafts, as one answer has it."""

    @property
    def hidden_rows(self) -> HiddenRows | None:
        """What its drafter reads of the model beside tokens (``HiddenRunner``); None: nothing."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """What it has allocated, by purpose."""

    def make_drafter(
        self, runner: Runner, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
    ) -> Drafter:
        """One for the answer to ``prompt`` [n], which ``runner`` holds or reads.

        ``length`` drafts so many always, None as many as pay.
        """


class ModelSource(Protocol):
    """A draft model as one answer has it."""

    @property
    def path(self) -> Path:
        """Of its file."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it can read and write."""

    @property
    def max_context(self) -> int:
        """Most tokens of a text that it drafts for."""

    def lend(self) -> AbstractContextManager[BatchRunner | None]:
        """Its sequence, for as long as the block lasts; None where it has none for this answer now.

        Another object than the last time if somebody else has written to it since.
        """


class DraftProvider(Protocol):
    """What a session takes its drafts from."""

    @property
    def hidden_rows(self) -> HiddenRows | None:
        """As that of its sources."""

    def prepared(self, sampling: SamplingParams, context: int) -> DraftSource | None:
        """A draft model with room for texts of ``context`` tokens; None where it is not to draft.

        Raises ResourceError if that does not fit in memory.
        """
