"""Kept conversations: which of them a prompt goes on from, and which are dropped for room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import Condition, Lock
from time import monotonic
from typing import TYPE_CHECKING

from ..engine.context_size import (
    OPEN_ANSWER_TOKENS,
    choose_context,
    context_limit,
    rotate_alike,
)
from ..engine.memory_fit import RESERVE_BYTES, check_start
from ..engine.transcript import count_common
from ..errors import EdgeH2OError, ResourceError
from ..host import memory
from .api_error import context_length_exceeded
from .call_grid import PromptShape
from .conversation import Conversation
from .scheduler import Scheduler
from .shared_draft import SharedDraft
from .shared_model import SharedModel
from .shared_runner import SharedRunner

if TYPE_CHECKING:
    from ..engine.prompt import Prompt
    from ..engine.session import Session
    from .prefix_disk import PrefixDisk, SavedPrefix

_logger = logging.getLogger(__name__)

# A prefix below this is read again rather than copied.
LEAST_PREFIX = 32
# Of tokens that a file saves, below which it is not worth its reading.
LEAST_SAVING = 256
# A kept conversation is gone on from itself, not from a copy, if that loses no more than this: its
# short answer, and the chunk behind the last mark. Rows of 6,000 tokens of SmolLM2-135M take as
# long to copy as 300 tokens to read.
MOST_LOST = 512
MOST_KEPT = 256
# Of what is free once the weights are loaded.
DEFAULT_SHARE = 4
# Seconds in which the end of the server may write to the disk.
MOST_SAVING_S = 30.0


# Marks beside rows and scores: 77 MiB beside 142 after 4,670 tokens of SmolLM2-135M.
MARKS_SHARE = 0.6
# Seconds between two looks of a request that waits for memory, and in which what was held is freed.
WAIT_S = 0.1
FREEING_S = 1.0


class _MakingRoom(Exception):
    """Memory will be free when another request is done, or what leaves is on the disk."""


class ConversationPool:
    """Sessions over the weights of one, each with a conversation that others may go on from.

    ``ram_bytes`` bounds what those at rest and those at work hold together, but that one may
    always be at work. A request waits for others where the memory of the machine, or of its
    container, does not hold what they are yet to write beside its own: that nobody has taken it
    yet does not mean that it is free. With ``disk`` those that go for room go there, and come back.
    """

    def __init__(
        self,
        opened: Session,
        scheduler: Scheduler,
        *,
        ram_bytes: int | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        self.prompts = opened.prompts
        self.plan = opened.plan
        self.context_limit = context_limit(self.plan)  # tokens of a prompt and its answer
        self._opened = opened
        self.model = SharedModel(opened.model, scheduler)
        self.draft = None if opened.draft is None else SharedDraft(opened.draft, scheduler)
        if ram_bytes is None:
            ram_bytes = memory.available_bytes() // DEFAULT_SHARE
        self.ram_bytes = ram_bytes
        self.disk = disk
        self._kept: list[Conversation] = []
        self._leaving: tuple[Conversation, Future[None]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edgeh2o-disk")
        self._is_closed = False
        self._given_back_at = float("-inf")
        self._lock = Lock()
        self._freed = Condition(self._lock)
        self.prompt_lock = Lock()  # of ``prompts``, which serve one thread at a time

    @property
    def n_bytes(self) -> int:
        """What all kept conversations hold."""
        with self._lock:
            return self._held_bytes()

    def _held_bytes(self) -> int:
        leaving = 0 if self._leaving is None else self._leaving[0].n_bytes
        return sum(each.n_bytes for each in self._kept) + leaving

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def borrow(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        n_question: int = 0,
        require: Callable[[], None] = lambda: None,
    ) -> Iterator[Conversation]:
        """The conversation that ``prompt`` is best read in; its ``stream`` takes ``keep_cache``.

        ``n_question`` of its tokens may be asked anew. ``require`` raises once the request is not
        wanted any more. Raises ApiError for a prompt that is too long, ResourceError for one that
        does not fit in memory.
        """
        chosen = None
        while chosen is None:
            taken: Conversation | None = None
            with suppress(_MakingRoom), self._lock:
                taken, saved = self._choose(prompt, max_tokens, n_question)
            if taken is None:  # the frames of the error, which is gone, held conversations
                self._wait_for_room()
                require()
            elif saved is None or self._load(taken, saved):
                chosen = taken
        if chosen.runner is not None:
            chosen.runner.expect_prompt(chosen.shape_of(prompt, n_question))
        try:
            yield chosen
        finally:
            with self._lock:
                self._give_back(chosen)

    def _wait_for_room(self) -> None:
        self.wait_for_disk(WAIT_S)
        with self._freed:
            if self._may_be_freed():
                self._freed.wait(WAIT_S)

    def wait_for_disk(self, timeout_s: float | None = None) -> None:
        """Until what is leaving for the disk is there."""
        with self._lock:
            leaving = self._leaving
        if leaving is not None:
            wait([leaving[1]], timeout_s)

    def close(self) -> None:
        """Writes what is at rest to the disk, the latest first."""
        with self._lock:
            self._is_closed = True
            idle = [each for each in self._kept if not each.is_busy]
        self._writer.shutdown()
        end = monotonic() + MOST_SAVING_S
        if self.disk is None:
            return
        for each in sorted(idle, key=lambda each: each.idle_s):
            if monotonic() > end:
                _logger.warning("the disk is too slow to keep all conversations")
                break
            self.disk.save(each)

    def _choose(
        self, prompt: Prompt, max_tokens: int, n_question: int
    ) -> tuple[Conversation, SavedPrefix | None]:
        """A conversation that is the caller's now, and the file to load into it first."""
        ids = prompt.encode()
        n_tokens = len(ids)
        if n_tokens > self.context_limit:
            raise context_length_exceeded(n_tokens, self.context_limit)
        context = choose_context(self.plan, n_tokens, max_tokens)
        best, n_best, departs = None, 0, None
        for each in self._kept:
            n_usable, n_common = self._count_usable(each, prompt, n_question)
            if n_usable > n_best and each.session.cache.may_go_on(n_usable, n_tokens, context):
                best, n_best, departs = each, n_usable, n_common
        if self.disk is not None:
            shape = PromptShape(n_tokens, n_question)
            grid = self.model.call_grid(self.plan.attention, self.plan.shape(n_tokens))
            saved = self.disk.find(
                ids,
                shape,
                grid,
                at_least=n_best + LEAST_SAVING,
                may_go_on=lambda file, n: (
                    rotate_alike(self.plan.config, file.context, context)
                    and self.plan.may_go_on_by(file.plan, n, n_tokens, context)
                ),
            )
            if saved is not None:
                return self._new(max(n_tokens, len(saved.token_ids)), max_tokens), saved
        if best is not None and departs is not None:
            self._log_departure(best, prompt, n_best, departs)
        if best is None or n_best < LEAST_PREFIX:
            return self._begin(n_tokens, max_tokens), None
        runner = best.runner
        assert runner is not None
        if not best.is_busy:
            n_lost = len(runner.token_ids) - n_best
            if n_lost <= MOST_LOST or not self._can_copy(runner, n_best):
                expected = sum(self._estimate(n_tokens, max_tokens))
                self._make_room(expected - best.n_bytes, spared=best)
                best.is_busy, best.expected_bytes = True, expected
                return best, None
        kept = self._new(n_tokens, max_tokens, spared=best)
        try:
            kept.session.begin_as(best.session, n_best, context)
        except (ResourceError, ValueError):
            self._kept.remove(kept)
            if best.is_busy:
                return self._begin(n_tokens, max_tokens), None
            best.is_busy, best.expected_bytes = True, kept.expected_bytes
            return best, None
        return kept, None

    def _load(self, kept: Conversation, saved: SavedPrefix) -> bool:
        """Takes up a file; whether it was good."""
        assert self.disk is not None
        try:
            kept.session.load(saved.path)
        except EdgeH2OError as error:
            self.disk.forget(saved, error)
            with self._lock:
                self._kept.remove(kept)
            return False
        self.disk.touch(saved.path)
        _logger.info("%d tokens are taken from %s", len(saved.token_ids), saved.path)
        return True

    def _count_usable(self, each: Conversation, prompt: Prompt, n_question: int) -> tuple[int, int]:
        """Tokens of the prompt that need not be read again, and those that are alike."""
        runner = each.runner
        if runner is None:
            return 0, 0
        if each.is_busy and not runner.can_be_copied:
            return 0, 0
        transcript = None if each.is_busy else each.session.transcript
        ids = prompt.encode(transcript)
        n_common = count_common(runner.token_ids, ids)
        shape = PromptShape(len(ids), n_question)
        if each.is_busy:
            places = runner.places
            return runner.grid.last_mark(places.marks, n_common, shape, places), n_common
        runner.expect_prompt(shape)
        n_usable = n_common
        if n_usable == len(ids) and runner.prompt_logits is None:
            n_usable -= 1
        return runner.find_mark(n_usable), n_common

    @staticmethod
    def _can_copy(runner: SharedRunner, n_tokens: int) -> bool:
        return runner.can_be_copied and n_tokens in runner.places.marks

    def _begin(self, n_tokens: int, max_tokens: int) -> Conversation:
        """A new conversation with nothing in its cache; others go until there is room for it.

        None go for what would not fit without all of them.
        """
        context = choose_context(self.plan, n_tokens, max_tokens)
        self._check_room(n_tokens, max_tokens)
        kept = self._new(n_tokens, max_tokens)
        while True:
            try:
                kept.session.prepare(n_tokens, max_tokens, stays_open=True)
                break
            except ResourceError:
                has_dropped = self._leaving is None and self._drop_oldest()
                if self._leaving is None and has_dropped:
                    continue
                self._kept.remove(kept)
                if self._leaving is not None or self._may_be_freed():
                    raise _MakingRoom from None
                raise
        assert kept.runner is not None and kept.runner.max_context >= min(context, n_tokens)
        return kept

    def _check_room(self, n_tokens: int, max_tokens: int) -> None:
        """Raises ResourceError for a prompt that does not fit even in place of all that can go."""
        plan, context = self._opened.cache.plan_prompt(
            n_tokens, max_tokens, goes_on=False, stays_open=True
        )
        gone = [each.runner for each in self._kept]  # those at work will rest
        gone += [] if self._leaving is None else [self._leaving[0].runner]
        freed = sum(sum(runner.memory_bytes.values()) for runner in gone if runner is not None)
        try:
            check_start(plan, self.model, plan.shape(context), freed)
        except ResourceError:
            if self._is_freeing():
                raise _MakingRoom from None
            raise

    def _new(
        self, n_tokens: int, max_tokens: int, spared: Conversation | None = None
    ) -> Conversation:
        """A conversation without a runner; the ones used least lately go for its room."""
        needed, later = self._estimate(n_tokens, max_tokens)
        while len(self._kept) >= MOST_KEPT or self._held_bytes() + needed > self.ram_bytes:
            if self._leaving is not None:
                raise _MakingRoom
            if not self._drop_oldest(spared):
                break
        self._make_room(needed + later, spared)
        kept = Conversation(self.model, self.plan, self._opened, self.draft)
        kept.expected_bytes = needed + later
        self._kept.append(kept)
        return kept

    def _estimate(self, n_tokens: int, max_tokens: int) -> tuple[int, int]:
        """What a prompt writes of rows and scores, and what its answer and marks take besides."""
        attention = self.plan.for_length(choose_context(self.plan, n_tokens, -1)).attention

        def written(n: int) -> int:
            parts = self.model.estimate_session_bytes(attention, self.plan.shape(n))
            return sum(parts.get(part, 0) for part in ("kv_cache", "scores", "recurrent_state"))

        answer = OPEN_ANSWER_TOKENS if max_tokens < 0 else max_tokens
        needed = written(n_tokens)
        whole = written(max(n_tokens, min(n_tokens + answer, self.context_limit)))
        return needed, int(whole * (1.0 + MARKS_SHARE)) - needed

    def _make_room(self, n_bytes: int, spared: Conversation | None) -> None:
        """Lets the oldest go for ``n_bytes`` of memory beside what others are yet to write.

        Where that is not enough, those at work are waited for, by ``_MakingRoom``; whoever is alone
        may try.
        """
        while self._left_bytes() < n_bytes:
            if self._leaving is not None:
                raise _MakingRoom
            if not self._drop_oldest(spared):
                if self._may_be_freed():
                    raise _MakingRoom
                break

    def _left_bytes(self) -> int:
        busy = [each for each in self._kept if each.is_busy]
        unwritten = sum(max(0, each.expected_bytes - each.n_bytes) for each in busy)
        return memory.available_bytes() - RESERVE_BYTES - self._workspace_bytes - unwritten

    @cached_property
    def _workspace_bytes(self) -> int:
        """What calls write to, which all share: it may not have been written yet."""
        shape = self.plan.shape(self.context_limit)
        parts = self.model.estimate_session_bytes(self.plan.attention, shape)
        return parts.get("activations", 0) + parts.get("scratch", 0)

    def _may_be_freed(self) -> bool:
        return self._is_freeing() or any(each.is_busy for each in self._kept)

    def _is_freeing(self) -> bool:
        """Whether others were at work just now: what they held is freed a little later."""
        return monotonic() - self._given_back_at < FREEING_S

    def _drop_oldest(self, spared: Conversation | None = None) -> bool:
        """Whether one has gone, or is leaving for the disk."""
        idle = [each for each in self._kept if not each.is_busy and each is not spared]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.used_at)
        self._kept.remove(oldest)
        if self.disk is None or self._is_closed:
            oldest.session.close()
        else:
            self._leaving = oldest, self._writer.submit(self._write, oldest)
        return True

    def _write(self, leaving: Conversation) -> None:
        try:
            assert self.disk is not None
            self.disk.save(leaving)
        finally:
            leaving.session.close()
            with self._lock:
                self._leaving = None
                self._trim()

    def _trim(self) -> None:
        """Lets the oldest go while more is held than may be."""
        while self._leaving is None and self._held_bytes() > self.ram_bytes:
            if not self._drop_oldest():
                break

    def _give_back(self, used: Conversation) -> None:
        used.report.listener = None
        if used.runner is not None:
            used.runner.leave()
        else:
            self._kept.remove(used)
        used.rest()
        self._given_back_at = monotonic()
        self._trim()
        self._freed.notify_all()

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
