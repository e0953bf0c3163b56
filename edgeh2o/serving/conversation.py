"""A kept conversation: a session of the engine, which one request at a time has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..engine.context_size import OPEN_ANSWER_TOKENS
from ..engine.session import Session
from .call_grid import PromptShape
from .shared_model import SharedModel
from .shared_runner import SharedRunner

if TYPE_CHECKING:
    from ..engine.plan import RunPlan
    from ..engine.prompt import Prompt
    from .shared_draft import SharedProvider

_logger = logging.getLogger(__name__)

ANY_SLOT = -1


class PrefillReport:
    """Who hears how far the prompt in progress is read: ``listener(done, total)``, or nobody.

    Of its own, so that a conversation and its session do not hold each other.
    """

    listener: Callable[[int, int], None] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """As ``OnProgress`` of a session."""
        if self.listener is not None and stage == "prefill":
            self.listener(done, total)


class Conversation:
    """A session of the engine with its place in the pool."""

    def __init__(
        self,
        pool_model: SharedModel,
        plan: RunPlan,
        opened: Session,
        draft: SharedProvider | None = None,
        *,
        open_context: int = 0,
    ) -> None:
        """``open_context``: as ``PromptCache`` has it."""
        self.report, self.draft = PrefillReport(), draft
        self.session = Session(
            opened.prompts, plan, path=opened.path, seed=None, on_progress=self.report
        )
        self.session.take_weights(pool_model, opened.load_s, draft)
        self.session.cache.takes_less = False  # others go for its room, or it waits for them
        self.session.cache.open_context = open_context
        self.is_busy = True
        self.slot = ANY_SLOT  # whose it is, where slots are saved by name
        self.expected_bytes = 0  # that it will hold when its request is done
        self.expected_tokens = 0  # of which it has memory for so many
        self.is_growing = False  # waits for memory for more
        self._resting_bytes = 0
        self.used_at = time.monotonic()

    @property
    def runner(self) -> SharedRunner | None:
        """None before its first prompt, and after one that did not fit."""
        runner = self.session.runner
        return runner if isinstance(runner, SharedRunner) else None

    def is_taken_for(self, slot: int) -> bool:
        """Whether a request at ``slot`` may only copy it: another has it, or another slot."""
        return self.is_busy or self.slot not in (ANY_SLOT, slot)

    def holds_same_as(self, other: Conversation) -> bool:
        """Whether both have read the same tokens by the same adapters."""
        ours, theirs = self.runner, other.runner
        if ours is None or theirs is None or ours.token_ids != theirs.token_ids:
            return False
        return self.session.plan.adapter_scales == other.session.plan.adapter_scales

    @property
    def n_bytes(self) -> int:
        """Memory that it holds: of one at rest, what it held when it came to rest."""
        runner = self.runner
        if self.is_busy:
            return 0 if runner is None else runner.held_bytes
        return self._resting_bytes

    def expect(self, n_tokens: int, n_bytes: int) -> None:
        """A request begins, which has ``n_bytes`` for ``n_tokens`` and an answer of open length."""
        self.is_busy, self.expected_bytes = True, n_bytes
        self.expected_tokens = n_tokens + OPEN_ANSWER_TOKENS

    def rest(self) -> None:
        """Its request is done with it."""
        self._resting_bytes = self.n_bytes
        self.is_busy, self.used_at = False, time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since it was used last."""
        return time.monotonic() - self.used_at

    def shape_of(self, prompt: Prompt, n_question: int) -> PromptShape:
        """What ``prompt`` is to this conversation, whose answers keep the tokens that were drawn.

        For one that is not at work.
        """
        return PromptShape(len(prompt.encode(self.session.transcript)), n_question)

    def log_departure(self, prompt: Prompt, n_usable: int, n_common: int, slot: int) -> None:
        """Which token of ``prompt`` made the rest of it useless: clients change the front."""
        runner = self.runner
        if runner is None or n_common >= len(runner.token_ids):
            return
        ids = prompt.encode(None if self.is_taken_for(slot) else self.session.transcript)
        if n_common < len(ids):
            text = self.session.model.tokenizer.decode([int(ids[n_common])])
            _logger.info(
                "prompt departs from a kept one at token %d, %r; %d tokens are cached",
                n_common,
                text,
                n_usable,
            )
