"""Kept conversations: which of them a prompt goes on from, and which are dropped for room."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ..engine.session import Session
from ..engine.transcript import count_common
from ..errors import ResourceError
from ..host import memory
from .api_error import context_length_exceeded
from .scheduler import Scheduler
from .shared_runner import SharedModel, SharedRunner

if TYPE_CHECKING:
    from ..engine.plan import RunPlan
    from ..engine.prompt import Prompt

_logger = logging.getLogger(__name__)

# A prefix below this is read again rather than copied.
LEAST_PREFIX = 32
# A kept conversation is gone on from itself, not from a copy, if that loses no more than this: its
# short answer, and the chunk behind the last mark. Rows of 6,000 tokens of SmolLM2-135M take as
# long to copy as 300 tokens to read.
MOST_LOST = 512
MOST_KEPT = 256
# Of what is free once the weights are loaded.
DEFAULT_SHARE = 4


class Conversation:
    """A session of the engine with its place in the pool; one request at a time has it."""

    def __init__(self, pool_model: SharedModel, plan: RunPlan, opened: Session) -> None:
        self.session = Session(
            opened.prompts, plan, path=opened.path, seed=None, on_progress=self._report
        )
        self.session.take_weights(pool_model, opened.load_s)
        self.on_prefill: Callable[[int, int], None] | None = None
        self.is_busy = True
        self.used_at = time.monotonic()

    def _report(self, stage: str, done: int, total: int) -> None:
        if self.on_prefill is not None and stage == "prefill":
            self.on_prefill(done, total)

    @property
    def runner(self) -> SharedRunner | None:
        """None before its first prompt, and after one that did not fit."""
        runner = self.session.runner
        return runner if isinstance(runner, SharedRunner) else None

    @property
    def n_bytes(self) -> int:
        """Memory that it holds; rows that were never written take none."""
        runner = self.runner
        if runner is None:
            return 0
        sizes, share = runner.memory_bytes, runner.most_tokens / runner.max_context
        return int(sizes.get("kv_cache", 0) * share) + _n_fixed_bytes(sizes)


def _n_fixed_bytes(sizes: Mapping[str, int]) -> int:
    """What a conversation holds besides rows of its tokens."""
    return sizes.get("scores", 0) + sizes.get("recurrent_state", 0)


class ConversationPool:
    """Sessions over the weights of one, each with a conversation that others may go on from.

    ``ram_bytes`` bounds what those at rest and those at work hold together, but that one may
    always be at work.
    """

    def __init__(
        self, opened: Session, scheduler: Scheduler, *, ram_bytes: int | None = None
    ) -> None:
        self.prompts = opened.prompts
        self.plan = opened.plan
        self._opened = opened
        self.model = SharedModel(opened.model, scheduler)
        if ram_bytes is None:
            ram_bytes = memory.available_bytes() // DEFAULT_SHARE
        self.ram_bytes = ram_bytes
        self._kept: list[Conversation] = []
        self._lock = Lock()
        self.prompt_lock = Lock()  # of ``prompts``, which serve one thread at a time

    @property
    def context_limit(self) -> int:
        """Most tokens of a prompt and its answer."""
        trained = self.plan.config.context_length
        return self.plan.context_size or trained

    @property
    def n_bytes(self) -> int:
        """What all kept conversations hold."""
        with self._lock:
            return sum(each.n_bytes for each in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def borrow(self, prompt: Prompt, max_tokens: int) -> Iterator[Conversation]:
        """The conversation that ``prompt`` is best read in; its ``stream`` takes ``keep_cache``.

        Raises ApiError for a prompt that is too long, ResourceError for one that does not fit in
        memory.
        """
        with self._lock:
            chosen = self._choose(prompt, max_tokens)
        try:
            yield chosen
        finally:
            with self._lock:
                self._give_back(chosen)

    def _choose(self, prompt: Prompt, max_tokens: int) -> Conversation:
        n_tokens = len(prompt.encode())
        if n_tokens > self.context_limit:
            raise context_length_exceeded(n_tokens, self.context_limit)
        best, n_best, departs = None, 0, None
        for each in self._kept:
            n_usable, n_common = self._count_usable(each, prompt)
            if n_usable > n_best:
                best, n_best, departs = each, n_usable, n_common
        if best is not None and departs is not None:
            self._log_departure(best, prompt, n_best, departs)
        if best is None or n_best < LEAST_PREFIX:
            return self._begin(n_tokens, max_tokens)
        runner = best.runner
        assert runner is not None
        if not best.is_busy:
            n_lost = len(runner.token_ids) - n_best
            if n_lost <= MOST_LOST or not self._can_copy(runner, n_best):
                return self._take(best, n_tokens)
        context = best.session.plan.choose_context(n_tokens, max_tokens)
        kept = self._new(n_tokens, spared=best)
        try:
            kept.session.begin_as(best.session, n_best, context)
        except (ResourceError, ValueError):
            self._kept.remove(kept)
            if best.is_busy:
                return self._begin(n_tokens, max_tokens)
            return self._take(best, n_tokens)
        return self._take(kept, n_tokens)

    def _count_usable(self, each: Conversation, prompt: Prompt) -> tuple[int, int]:
        """Tokens of the prompt that need not be read again, and those that are alike."""
        runner = each.runner
        if runner is None:
            return 0, 0
        if each.is_busy and not runner.can_be_copied:
            return 0, 0
        transcript = None if each.is_busy else each.session.transcript
        ids = prompt.encode(transcript)
        n_common = count_common(runner.token_ids, ids)
        if each.is_busy:
            most = min(n_common, len(ids) - runner.least_last_call)
            return max((mark for mark in runner.marks if mark <= most), default=0), n_common
        runner.expect_prompt(len(ids))
        n_usable = n_common
        if n_usable == len(ids) and runner.prompt_logits is None:
            n_usable -= 1
        return runner.find_mark(n_usable), n_common

    @staticmethod
    def _can_copy(runner: SharedRunner, n_tokens: int) -> bool:
        return runner.can_be_copied and n_tokens in runner.marks

    def _take(self, chosen: Conversation, n_tokens: int) -> Conversation:
        chosen.is_busy = True
        if chosen.runner is not None:
            chosen.runner.expect_prompt(n_tokens)
        return chosen

    def _begin(self, n_tokens: int, max_tokens: int) -> Conversation:
        """A new conversation with nothing in its cache; others go until there is room for it."""
        context = self.plan.choose_context(n_tokens, max_tokens)
        kept = self._new(n_tokens)
        while True:
            try:
                kept.session.prepare(n_tokens, max_tokens)
                break
            except ResourceError:
                if not self._drop_oldest():
                    self._kept.remove(kept)
                    raise
        assert kept.runner is not None and kept.runner.max_context >= min(context, n_tokens)
        return self._take(kept, n_tokens)

    def _new(self, n_tokens: int, spared: Conversation | None = None) -> Conversation:
        """A conversation without a runner; the ones used least lately go for its room."""
        shape = self.plan.shape(self.plan.choose_context(n_tokens, -1))
        parts = self.model.estimate_session_bytes(self.plan.attention, shape)
        needed = parts.get("kv_cache", 0) * n_tokens // shape.max_context + _n_fixed_bytes(parts)
        while (
            len(self._kept) >= MOST_KEPT
            or sum(each.n_bytes for each in self._kept) + needed > self.ram_bytes
        ):
            if not self._drop_oldest(spared):
                break
        kept = Conversation(self.model, self.plan, self._opened)
        self._kept.append(kept)
        return kept

    def _drop_oldest(self, spared: Conversation | None = None) -> bool:
        idle = [each for each in self._kept if not each.is_busy and each is not spared]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.used_at)
        self._kept.remove(oldest)
        oldest.session.runner = None  # its memory is free once nobody reads a stream of it
        return True

    def _give_back(self, used: Conversation) -> None:
        used.is_busy, used.used_at, used.on_prefill = False, time.monotonic(), None
        if used.runner is not None:
            used.runner.leave()
        else:
            self._kept.remove(used)
        if used.session.plan is not self.plan:  # a prompt has made a profile
            self.plan = used.session.plan
            for each in self._kept:
                each.session.plan = self.plan
        while sum(each.n_bytes for each in self._kept) > self.ram_bytes:
            if not self._drop_oldest():
                break

    def _log_departure(
        self, best: Conversation, prompt: Prompt, n_usable: int, n_common: int
    ) -> None:
        """Which token made the rest of a kept conversation useless: clients change the front."""
        runner = best.runner
        if runner is None or n_common >= len(runner.token_ids):
            return
        ids = prompt.encode(None if best.is_busy else best.session.transcript)
        if n_common < len(ids):
            text = self.model.tokenizer.decode([int(ids[n_common])])
            _logger.info(
                "prompt departs from a kept one at token %d, %r; %d tokens are cached",
                n_common,
                text,
                n_usable,
            )
