"""Room in memory for conversations: which go for others, to the disk or for good, and who waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Condition, RLock
from time import monotonic
from typing import TYPE_CHECKING

from ..engine.context_size import OPEN_ANSWER_TOKENS, choose_context, context_limit
from ..engine.memory_fit import RESERVE_BYTES, check_start
from ..errors import ResourceError
from ..host import memory
from .scheduler import CancelledError
from .shared_runner import SHARED_PARTS

if TYPE_CHECKING:
    from ..engine.plan import RunPlan
    from .conversation import Conversation
    from .prefix_disk import PrefixDisk
    from .shared_model import SharedModel

_logger = logging.getLogger(__name__)

MOST_KEPT = 256
# Of what is free once the weights are loaded.
DEFAULT_SHARE = 4
# Marks beside rows and scores: 77 MiB beside 142 after 4,670 tokens of SmolLM2-135M.
MARKS_SHARE = 0.6
# Seconds between two looks of a request that waits for memory, and in which what was held is freed.
WAIT_S = 0.1
FREEING_S = 1.0
# Seconds in which the end of the server may write to the disk.
MOST_SAVING_S = 30.0


class MakingRoomError(Exception):
    """Memory will be free when another request is done, or what leaves is on the disk."""


class ConversationRoom:
    """The kept conversations, and the memory that those at rest and at work hold together.

    ``ram_bytes`` bounds it, but that one may always be at work; None: a share of what is free. With
    ``disk`` those that go for room go there. ``lock`` is held by whoever looks at ``kept`` or calls
    a method that names it.
    """

    def __init__(
        self,
        plan: RunPlan,
        model: SharedModel,
        *,
        ram_bytes: int | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        self._plan, self._model, self._disk = plan, model, disk
        if ram_bytes is None:
            ram_bytes = memory.available_bytes() // DEFAULT_SHARE
        self._ram_bytes = ram_bytes
        self.kept: list[Conversation] = []
        self.lock = RLock()
        self._freed = Condition(self.lock)
        self._given_back_at = float("-inf")
        self._leaving: tuple[Conversation, Future[None]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="edgeh2o-disk")
        self._is_closed = self._is_given_up = False

    @property
    def held_bytes(self) -> int:
        """What all conversations hold; without ``lock`` about so much."""
        kept, leaving = tuple(self.kept), self._leaving
        return sum(each.n_bytes for each in kept) + (0 if leaving is None else leaving[0].n_bytes)

    def make_for_new(
        self, n_tokens: int, max_tokens: int, spared: Conversation | None = None
    ) -> int:
        """Lets those used least lately go for another conversation, with ``lock``; what it takes.

        Raises MakingRoomError as ``make`` does.
        """
        needed, later = self.estimate(n_tokens, max_tokens)
        while len(self.kept) >= MOST_KEPT or self.held_bytes + needed > self._ram_bytes:
            if self._leaving is not None:
                raise MakingRoomError
            if not self._drop_oldest(spared):
                break
        self.make(needed + later, spared)
        return needed + later

    def make(self, n_bytes: int, spared: Conversation | None) -> None:
        """Lets the oldest go for memory beside what others are yet to write, with ``lock``.

        Where that is not enough, those at work are waited for: MakingRoomError. Whoever is alone
        may try. That nobody has taken it yet does not mean that it is free.
        """
        while self._left_bytes() < n_bytes and self.free_some(spared):
            pass

    def free_some(self, spared: Conversation | None = None) -> bool:
        """Whether one has gone, the others being at work or ``spared``, with ``lock``.

        Raises MakingRoomError where none has, and memory will be free all the same.
        """
        if self._leaving is None and self._drop_oldest(spared) and self._leaving is None:
            return True
        if self._leaving is not None or self._is_freeing() or any(e.is_busy for e in self.kept):
            raise MakingRoomError
        return False

    def check(self, plan: RunPlan, context: int) -> None:
        """Raises ResourceError for a session that does not fit even in place of all, with ``lock``.

        None then go for it. MakingRoomError where what others held is being freed.
        """
        freed = self.held_bytes  # those at work will rest
        if memory.address_space_left_bytes() is not None:  # which rows never written take too
            gone = [each.runner for each in self.kept]
            gone += [] if self._leaving is None else [self._leaving[0].runner]
            freed = sum(sum(runner.memory_bytes.values()) for runner in gone if runner is not None)
        try:
            check_start(plan, self._model, plan.shape(context), freed)
        except ResourceError:
            if self._is_freeing():
                raise MakingRoomError from None
            raise

    def estimate(self, n_tokens: int, max_tokens: int) -> tuple[int, int]:
        """What a prompt writes of rows and scores, and what its answer and marks take besides.

        Of a longer answer what one of open length takes: ``grow`` asks for more when it is there.
        """
        needed, whole = self._estimate_rows(n_tokens, max_tokens)
        return needed, int(whole * (1.0 + MARKS_SHARE)) - needed

    def _estimate_rows(self, n_tokens: int, max_tokens: int) -> tuple[int, int]:
        """Rows and scores of so many tokens, and of them with their answer."""
        attention = self._plan.for_length(choose_context(self._plan, n_tokens, -1)).attention

        def written(n: int) -> int:
            parts = self._model.estimate_session_bytes(attention, self._plan.shape(n))
            own = ("kv_cache", "scores", "recurrent_state", "recurrent_ahead")
            return sum(parts.get(part, 0) for part in own)

        answer = OPEN_ANSWER_TOKENS if max_tokens < 0 else min(max_tokens, OPEN_ANSWER_TOKENS)
        whole = max(n_tokens, min(n_tokens + answer, context_limit(self._plan)))
        return written(n_tokens), written(whole)

    def grow(self, growing: Conversation, n_tokens: int, require: Callable[[], None]) -> bool:
        """Whether an answer may go on beyond ``n_tokens``: there is memory for more of it now.

        Those at rest go for it, and others at work are waited for, but never in a circle.
        ``require`` raises once the request is not wanted any more.
        """
        try:
            while True:
                with self.lock:
                    growing.is_growing = False
                    # An answer makes no marks: those of its prompt are there.
                    before, after = self._estimate_rows(n_tokens, -1)
                    needed = after - before
                    growing.expected_bytes = growing.n_bytes
                    with suppress(MakingRoomError):
                        self.make(needed, growing)
                    if self._left_bytes() >= needed:
                        growing.expect(n_tokens, growing.n_bytes + needed)
                        return True
                    is_freeing = self._leaving is not None or self._is_freeing()
                    if not is_freeing and all(e.is_growing for e in self._busy_beside(growing)):
                        return False
                    growing.is_growing = True
                self.wait()
                require()
        finally:
            growing.is_growing = False

    def _busy_beside(self, spared: Conversation) -> list[Conversation]:
        return [each for each in self.kept if each.is_busy and each is not spared]

    def _left_bytes(self) -> int:
        busy = [each for each in self.kept if each.is_busy]
        unwritten = sum(max(0, each.expected_bytes - each.n_bytes) for each in busy)
        shape = self._plan.shape(context_limit(self._plan))
        parts = self._model.estimate_session_bytes(self._plan.attention, shape)
        unwritten += sum(parts.get(part, 0) for part in SHARED_PARTS)
        return memory.available_bytes() - RESERVE_BYTES - unwritten

    def _is_freeing(self) -> bool:
        """Whether others were at work just now: what they held is freed a little later."""
        return monotonic() - self._given_back_at < FREEING_S

    def _drop_oldest(self, spared: Conversation | None = None) -> bool:
        """Whether one has gone, or is leaving for the disk."""
        idle = [each for each in self.kept if not each.is_busy and each is not spared]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.used_at)
        self.kept.remove(oldest)
        if self._disk is None or self._is_closed:
            oldest.session.close()
        else:
            self._leaving = oldest, self._writer.submit(self._write, oldest, self._disk)
        return True

    def drop_like(self, kept: Conversation, slot: int) -> None:
        """Lets those go that hold the same and that ``slot`` may take, with ``lock``."""
        for each in [each for each in self.kept if not each.is_taken_for(slot)]:
            if each.holds_same_as(kept):
                self.kept.remove(each)
                each.session.close()

    def _write(self, leaving: Conversation, disk: PrefixDisk) -> None:
        try:
            disk.save(leaving, self._require_saving)
        except Exception:  # nobody waits for what comes of it
            _logger.exception("a conversation is not kept on the disk")
        finally:
            leaving.session.close()
            with self.lock:
                self._leaving = None
                self._trim()

    def _trim(self) -> None:
        """Lets the oldest go while more is held than may be."""
        while self._leaving is None and self.held_bytes > self._ram_bytes:
            if not self._drop_oldest():
                break

    def give_back(self, used: Conversation) -> None:
        """One at work comes to rest, or goes if it has nothing to keep, with ``lock``."""
        if used.runner is None:
            self.kept.remove(used)
        used.rest()
        self._given_back_at = monotonic()
        self._trim()
        self._freed.notify_all()

    def discard(self, failed: Conversation) -> None:
        """One at work that is of no use goes with what it holds, with ``lock``."""
        self.kept.remove(failed)
        if failed.n_bytes:
            self._given_back_at = monotonic()
        failed.session.close()
        self._freed.notify_all()

    def wait(self) -> None:
        """A while, or until something was freed."""
        self.wait_for_disk(WAIT_S)
        with self.lock:
            if self._is_freeing() or any(each.is_busy for each in self.kept):
                self._freed.wait(WAIT_S)

    def wait_for_disk(self, timeout_s: float | None = None) -> None:
        """Until what is leaving for the disk is there."""
        with self.lock:
            leaving = self._leaving
        if leaving is not None:
            wait([leaving[1]], timeout_s)

    def give_up_saving(self) -> None:
        """Has ``close``, once it was called, write no more: of the file at hand nothing stays.

        For signal handlers, which may not wait.
        """
        self._is_given_up = self._is_closed

    def _require_saving(self) -> None:
        if self._is_given_up:
            raise CancelledError("the end of the server was not to wait for the disk")

    def close(self) -> None:
        """Writes what is at rest to the disk, the latest first."""
        with self.lock:
            self._is_closed = True
            idle = [each for each in self.kept if not each.is_busy]
        self._writer.shutdown()
        end = monotonic() + MOST_SAVING_S
        if self._disk is None:
            return
        for each in sorted(idle, key=lambda each: each.idle_s):
            if self._is_given_up:
                break
            if monotonic() > end:
                _logger.warning("the disk is too slow to keep all conversations")
                break
            self._disk.save(each, self._require_saving)
