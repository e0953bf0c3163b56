"""What drafts, one model or layer, for answers that are written side by side."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..engine.draft_model import make_model_drafter
from ..errors import ResourceError
from ..sampling_config import DRAFT_OFF

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.cache_draft import CacheDraft
    from ..engine.draft_model import DraftModel
    from ..engine.draft_sources import DraftProvider, DraftSource
    from ..engine.drafting import CallCosts, Drafter
    from ..engine.own_draft import OwnDraft
    from ..runners.base import BatchRunner, HiddenRows, HiddenRunner, Runner
    from ..sampling_config import SamplingParams
    from .scheduler import Scheduler

_logger = logging.getLogger(__name__)


class SharedProvider(Protocol):
    """A ``DraftProvider`` of one conversation."""

    @property
    def hidden_rows(self) -> HiddenRows | None:
        """See ``DraftSource``."""

    def prepared(self, sampling: SamplingParams, context: int) -> DraftSource | None:
        """As ``DraftProvider``, but None where there is no room, and while others have it."""

    def give_back(self) -> None:
        """The answer is written."""


def share_draft(
    draft: DraftProvider | None, scheduler: Scheduler
) -> SharedDraft | SharedOwnDraft | SharedCacheDraft | None:
    """What conversations have of ``draft``."""
    if draft is None:
        return None
    if draft.hidden_rows is None:
        return SharedDraft(draft, scheduler)
    if draft.hidden_rows.is_last_only:
        return SharedCacheDraft(cast("CacheDraft", draft), scheduler)
    return SharedOwnDraft(cast("OwnDraft", draft), scheduler)


class SharedDraft:
    """A ``DraftProvider`` whose only sequence drafts for the answer that is alone.

    While others are written or prompts are read none are made: everybody would wait for them, and
    a token drafted for one of b answers costs b times as much as for one alone. An answer that
    finds the sequence with another one's text has it read its own.
    """

    hidden_rows = None

    def __init__(self, draft: DraftProvider, scheduler: Scheduler) -> None:
        self._draft = draft
        self.scheduler = scheduler
        self._source: DraftModel | None = None
        self._at_work = Lock()  # held by whoever has the sequence
        self._latest: LentDraft | None = None  # whose text it holds

    def for_conversation(self) -> SharedProvider:
        """It lends call by call, so that all have the same."""
        return self

    def give_back(self) -> None:
        """Whoever has its sequence has it for a draft."""

    def prepared(self, sampling: SamplingParams, context: int) -> LentDraft | None:
        """As ``DraftProvider``; None also without room for it, and while it is at work."""
        if not self._at_work.acquire(blocking=False):
            return None
        try:
            prepare = partial(self._draft.prepared, sampling, context)
            source = cast("DraftModel | None", self.scheduler.call(prepare))
            if source is None:
                return None
            self._source, self._latest = source, None
            return LentDraft(self, source)
        except ResourceError as error:
            _logger.warning("an answer is written without the draft model: %s", error)
            return None
        finally:
            self._at_work.release()

    @contextmanager
    def lend(self, borrower: LentDraft) -> Iterator[BatchRunner | None]:
        """The sequence, whose calls take turns with all others."""
        if not self.scheduler.is_quiet or not self._at_work.acquire(blocking=False):
            yield None
            return
        try:
            source = self._source
            assert source is not None  # there is none to lend before
            with source.lend() as runner:
                if runner is None:  # a longer one had no room, and this one had gone for it
                    borrower.runner = None
                elif borrower is not self._latest:
                    borrower.runner = cast("BatchRunner", _InTurn(runner, self.scheduler))
                self._latest = borrower
                yield borrower.runner
        finally:
            self._at_work.release()


class LentDraft:
    """The ``DraftSource`` of one answer."""

    hidden_rows = None

    def __init__(self, shared: SharedDraft, source: DraftModel) -> None:
        self._shared, self._source = shared, source
        self.runner: BatchRunner | None = None

    @property
    def max_context(self) -> int:
        return self._source.max_context

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def vocab_size(self) -> int:
        return self._source.vocab_size

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return self._source.memory_bytes

    def lend(self) -> AbstractContextManager[BatchRunner | None]:
        return self._shared.lend(self)

    def make_drafter(
        self, runner: Runner, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
    ) -> Drafter:
        return make_model_drafter(self, prompt, costs, length)


class SharedOwnDraft:
    """Layers that read hidden rows, whose only sequence drafts for one answer until its end.

    That goes by hidden rows of all tokens, which nobody keeps: it cannot go from one answer to the
    other between two tokens, as a model's does. An answer that begins meanwhile has none of it.
    While others are written or prompts are read it reads on, and drafts nothing.
    """

    def __init__(self, draft: OwnDraft, scheduler: Scheduler) -> None:
        self._draft = draft
        self.hidden_rows = draft.hidden_rows
        self._lock = Lock()  # of the holder
        self._holder: _OwnDraftLoan | None = None
        draft.share(
            lambda runner: cast("HiddenRunner", _InTurn(runner, scheduler)),
            lambda: scheduler.is_quiet,
        )

    def for_conversation(self) -> SharedProvider:
        """What asks for it, and gives it back."""
        return _OwnDraftLoan(self)

    def take(
        self, borrower: _OwnDraftLoan, sampling: SamplingParams, context: int
    ) -> OwnDraft | None:
        """For an answer; None where another one has it, or it does not fit in memory."""
        if sampling.draft_tokens == DRAFT_OFF:
            return None
        with self._lock:
            if self._holder not in (None, borrower):
                return None
            self._holder = borrower
        try:
            return self._draft.prepared(sampling, context)
        except ResourceError as error:
            _logger.warning("an answer is written without the layer that drafts: %s", error)
            self.give_back(borrower)
            return None

    def give_back(self, borrower: _OwnDraftLoan) -> None:
        """Others may have it, if ``borrower`` had it."""
        with self._lock:
            if self._holder is borrower:
                self._holder = None


class _OwnDraftLoan:
    """A ``SharedProvider``."""

    def __init__(self, shared: SharedOwnDraft) -> None:
        self._shared = shared
        self.hidden_rows = shared.hidden_rows

    def prepared(self, sampling: SamplingParams, context: int) -> OwnDraft | None:
        return self._shared.take(self, sampling, context)

    def give_back(self) -> None:
        self._shared.give_back(self)


class SharedCacheDraft:
    """Layers that keep nothing, for all answers: each drafts while it is written alone."""

    def __init__(self, draft: CacheDraft, scheduler: Scheduler) -> None:
        self._draft = draft
        self.hidden_rows = draft.hidden_rows
        draft.share(partial(scheduler.call, is_next=True), lambda: scheduler.is_quiet)

    def for_conversation(self) -> SharedProvider:
        """All have the same."""
        return self

    def give_back(self) -> None:
        """Nobody has it alone."""

    def prepared(self, sampling: SamplingParams, context: int) -> CacheDraft | None:
        """As ``DraftProvider``."""
        return self._draft.prepared(sampling, context)


class _InTurn:
    """A runner whose calls are made by a scheduler, before others that wait."""

    _runner: BatchRunner
    _scheduler: Scheduler

    def __init__(self, runner: BatchRunner, scheduler: Scheduler) -> None:
        self.__dict__.update(_runner=runner, _scheduler=scheduler)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._runner, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._runner, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            return self._scheduler.call(partial(value, *args, **options), is_next=True)

        return call
