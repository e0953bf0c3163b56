"""Kept conversations: which of them a prompt goes on from, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..engine.context_size import choose_context, context_limit, memory_cures, rotate_alike
from ..engine.models import may_write_later
from ..engine.transcript import count_common
from ..errors import EdgeH2OError, ResourceError
from .api_error import PromptTooLongError
from .call_grid import PromptShape
from .conversation import ANY_SLOT, Conversation
from .room import ConversationRoom, MakingRoomError
from .scheduler import Scheduler
from .shared_draft import share_draft
from .shared_model import SharedModel
from .shared_runner import SharedRunner
from .tokens_aside import tokenise_aside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..engine.plan import RunPlan
    from ..engine.prompt import Prompt
    from ..engine.session import Session
    from .prefix_disk import PrefixDisk
    from .saved_prefix import SavedPrefix

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# A prefix below this is read again rather than copied.
LEAST_PREFIX = 32
# Of tokens that a file saves, below which it is not worth its reading.
LEAST_SAVING = 256
# A kept conversation is gone on from itself, not from a copy, if that loses no more than this: its
# short answer, and the chunk behind the last mark. Rows of 6,000 tokens of SmolLM2-135M take as
# long to copy as 300 tokens to read.
MOST_LOST = 512


class ConversationPool:
    """Sessions over the weights of one, each with a conversation that others may go on from.

    They share the memory that ``room`` bounds by ``ram_bytes`` and what the machine, or its
    container, has: a request waits where that does not hold what others are yet to write beside its
    own. With ``disk`` those that go for room go there, and come back.
    """

    def __init__(
        self,
        opened: Session,
        scheduler: Scheduler,
        *,
        ram_bytes: int | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        opened.cache.limit_to_memory()
        self.prompts = opened.prompts
        self.plan = opened.plan
        self.context_limit = context_limit(self.plan)  # tokens of a prompt and its answer
        self._opened, self.scheduler = opened, scheduler
        self.model = SharedModel(opened.model, scheduler)
        self.draft = share_draft(opened.draft, scheduler)
        self.disk = disk
        self.room = ConversationRoom(self.plan, self.model, ram_bytes=ram_bytes, disk=disk)
        # Without -c an answer may go on to the end of what there can be.
        is_open = self.plan.context_size is None and may_write_later(opened.model)
        self._open_context = self.context_limit if is_open else 0
        self.prompt_lock = Lock()  # of ``prompts``, which serve one thread at a time

    @property
    def n_bytes(self) -> int:
        """What all kept conversations hold, about: it waits for nobody, as statistics may not."""
        return self.room.held_bytes

    def __len__(self) -> int:
        return len(self.room.kept)

    @contextmanager
    def borrow(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        adapter_scales: tuple[float, ...] | None = None,
        n_question: int = 0,
        slot: int = ANY_SLOT,
        require: Callable[[], None] = lambda: None,
    ) -> Iterator[Conversation]:
        """The conversation that ``prompt`` is best read in; its ``stream`` takes ``keep_cache``.

        Adapters count by ``adapter_scales``, None: as the model was opened. ``n_question`` of its
        tokens may be asked anew. Of what another than ``slot`` keeps for itself it gets a copy.
        ``require`` raises once the request is not wanted any more. Raises ApiError for a prompt
        that is too long, ResourceError for one that does not fit in memory.
        """
        plan = self.plan if adapter_scales is None else self.plan.with_adapters(adapter_scales)
        chosen = None
        while chosen is None:
            taken, saved = tokenise_aside(
                prompt,
                lambda known: self._with_room(
                    lambda: self._choose(known, max_tokens, n_question, plan, slot), require
                ),
            )
            if saved is None or self._load(taken, saved):
                chosen = taken
        try:
            if chosen.runner is not None:
                chosen.runner.expect_prompt(chosen.shape_of(prompt, n_question))
            yield chosen
        finally:
            chosen.report.listener = None
            if chosen.runner is not None:
                chosen.runner.leave()
            if chosen.draft is not None:
                chosen.draft.give_back()
            with self.room.lock:
                self.room.give_back(chosen)

    def plan_of(self, n_tokens: int, max_tokens: int) -> tuple[RunPlan, int]:
        """By what a prompt that begins anew is read, and the context for it and its answer."""
        return self._opened.cache.plan_prompt(n_tokens, max_tokens, goes_on=False, stays_open=True)

    @contextmanager
    def reserve(self, n_bytes: int, require: Callable[[], None]) -> Iterator[None]:
        """Memory for something else than a conversation; ``require`` as ``borrow`` has it."""

        def take() -> Conversation:
            self.room.make(n_bytes, None)
            kept = Conversation(self.model, self.plan, self._opened)
            kept.expect(0, n_bytes)
            self.room.kept.append(kept)
            return kept

        kept = self._with_room(take, require)
        try:
            yield
        finally:
            with self.room.lock:
                self.room.give_back(kept)

    @contextmanager
    def hold(self, kept: Conversation, require: Callable[[], None]) -> Iterator[bool]:
        """A kept conversation that nobody else has meanwhile; whether it is kept still.

        ``require`` as ``borrow`` has it.
        """

        def take() -> bool:
            if kept not in self.room.kept:
                return False
            if kept.is_busy:
                raise MakingRoomError
            kept.expect(0, kept.n_bytes)
            return True

        is_kept = self._with_room(take, require)
        try:
            yield is_kept
        finally:
            with self.room.lock:
                if is_kept and kept in self.room.kept:
                    self.room.give_back(kept)

    def drop(self, kept: Conversation) -> None:
        """Forgets one that the caller holds, on the disk too."""
        runner, plan = kept.runner, kept.session.plan
        if self.disk is not None and runner is not None:
            token_ids = np.array(runner.token_ids, np.int32)
            self.disk.remove_beginnings(token_ids, plan.adapter_scales)
        with self.room.lock:
            self.room.kept.remove(kept)
        kept.session.close()

    def take_in(self, saved: SavedPrefix, slot: int, require: Callable[[], None]) -> Conversation:
        """A conversation of a session file, which is kept for ``slot`` from now on.

        ``require`` as ``borrow`` has it. Raises as ``Session.load``.
        """
        plan = self.plan.with_adapters(saved.plan.adapter_scales)
        n_tokens = len(saved.token_ids)
        kept = self._with_room(lambda: self._new(n_tokens, 0, plan), require)
        self._read_file(kept, saved)
        with self.room.lock:
            self.room.drop_like(kept, slot)
            kept.slot = slot
            self.room.give_back(kept)
        return kept

    def _with_room(self, take: Callable[[], T], require: Callable[[], None]) -> T:
        """What ``take`` gives, with the lock of the room, once there is room for it."""
        while True:
            with suppress(MakingRoomError), self.room.lock:
                return take()
            # The frames of the error, which is gone, held conversations.
            self.room.wait()
            require()

    def may_grow(self, used: Conversation, require: Callable[[], None]) -> bool:
        """Whether an answer may have another token: memory holds it. Asked after every one.

        Others are waited for meanwhile, as ``borrow`` does; ``require`` as there.
        """
        runner = used.runner
        if runner is None or runner.position < used.expected_tokens:
            return True
        runner.leave()
        if self.room.grow(used, runner.position, require):
            return True
        _logger.warning(
            "an answer ends at %d tokens of its context: memory has no room for more; %s",
            runner.position,
            memory_cures(),
        )
        return False

    def wait_for_disk(self) -> None:
        """Until what is leaving for the disk is there."""
        self.room.wait_for_disk()

    def close(self) -> None:
        """Writes what is at rest to the disk, the latest first."""
        self.room.close()

    def give_up_saving(self) -> None:
        """Has ``close`` write no more, if it writes."""
        self.room.give_up_saving()

    def _choose(
        self, prompt: Prompt, max_tokens: int, n_question: int, plan: RunPlan, slot: int
    ) -> tuple[Conversation, SavedPrefix | None]:
        """A conversation that is the caller's now, and the file to load into it first.

        What was read by other adapters than those of ``plan`` is of no use.
        """
        ids = prompt.encode()
        n_tokens = len(ids)
        if n_tokens > self.context_limit:
            raise PromptTooLongError(n_tokens, self.context_limit)
        context = choose_context(self.plan, n_tokens, max_tokens)
        best, n_best, departs = None, 0, None
        for each in self.room.kept:
            if each.session.plan.adapter_scales != plan.adapter_scales:
                continue
            n_usable, n_common = self._count_usable(each, prompt, n_question, slot)
            if n_usable > n_best and each.session.cache.may_go_on(n_usable, n_tokens, context):
                best, n_best, departs = each, n_usable, n_common
        shape, at_least = PromptShape(n_tokens, n_question), n_best + LEAST_SAVING
        saved = self._find_saved(ids, shape, context, plan.adapter_scales, at_least)
        if saved is not None:
            return self._new(max(n_tokens, len(saved.token_ids)), max_tokens, plan), saved
        if best is not None and departs is not None:
            best.log_departure(prompt, n_best, departs, slot)
        if best is None or n_best < LEAST_PREFIX:
            return self._begin(n_tokens, max_tokens, plan), None
        runner = best.runner
        assert runner is not None
        is_taken = best.is_taken_for(slot)
        if not is_taken:
            n_lost = len(runner.token_ids) - n_best
            if n_lost <= MOST_LOST or not self._can_copy(runner, n_best):
                expected = sum(self.room.estimate(n_tokens, max_tokens))
                self.room.make(expected - best.n_bytes, spared=best)
                best.expect(n_tokens, expected)
                return best, None
        kept = self._new(n_tokens, max_tokens, plan, spared=best)
        expected = kept.expected_bytes
        with suppress(ResourceError, ValueError), self._gone_if_failed(kept):
            kept.session.begin_as(best.session, n_best, context, n_tokens)
            return kept, None
        # What it held is free: no error holds the frames of the copy.
        if is_taken:
            return self._begin(n_tokens, max_tokens, plan), None
        best.expect(n_tokens, expected)
        return best, None

    def _find_saved(
        self,
        ids: NDArray[np.int32],
        shape: PromptShape,
        context: int,
        scales: tuple[float, ...],
        at_least: int,
    ) -> SavedPrefix | None:
        """The file from which so many tokens ``ids`` [n] can be taken, to go on in ``context``."""
        if self.disk is None:
            return None

        def may_go_on(file: SavedPrefix, n_usable: int) -> bool:
            return (
                file.plan.adapter_scales == scales
                and rotate_alike(self.plan.config, file.context, context)
                and self.plan.may_go_on_by(file.plan, n_usable, len(ids), context)
            )

        grid = self.model.call_grid(self.plan.attention, self.plan.shape(len(ids)))
        return self.disk.find(ids, shape, grid, at_least=at_least, may_go_on=may_go_on)

    def _load(self, kept: Conversation, saved: SavedPrefix) -> bool:
        """Takes up a file; whether it was good."""
        assert self.disk is not None
        try:
            self._read_file(kept, saved)
        except EdgeH2OError as error:
            self.disk.forget(saved, error)
            return False
        self.disk.touch(saved.path)
        _logger.info("%d tokens are taken from %s", len(saved.token_ids), saved.path)
        return True

    def _read_file(self, kept: Conversation, saved: SavedPrefix) -> None:
        """Takes up a file; one for which that fails is not kept. Raises as ``Session.load``."""
        with self._gone_if_failed(kept):
            kept.session.load(saved.path)

    @contextmanager
    def _gone_if_failed(self, kept: Conversation) -> Iterator[None]:
        """A new conversation goes, with what it holds, if what is done with it here fails."""
        try:
            yield
        except BaseException:
            with self.room.lock:
                self.room.discard(kept)
            raise

    def _count_usable(
        self, each: Conversation, prompt: Prompt, n_question: int, slot: int
    ) -> tuple[int, int]:
        """Tokens of the prompt that need not be read again, and those that are alike."""
        runner, is_taken = each.runner, each.is_taken_for(slot)
        if runner is None:
            return 0, 0
        if is_taken and not runner.can_be_copied:
            return 0, 0
        transcript = None if is_taken else each.session.transcript
        ids = prompt.encode(transcript)
        n_common = count_common(runner.token_ids, ids)
        shape = PromptShape(len(ids), n_question)
        if is_taken:
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

    def _begin(self, n_tokens: int, max_tokens: int, settled: RunPlan) -> Conversation:
        """A new conversation with nothing in its cache; others go until there is room for it.

        None go for what would not fit without all of them.
        """
        plan, context = self.plan_of(n_tokens, max_tokens)
        self.room.check(plan, min(context, choose_context(self.plan, n_tokens, -1)))
        while True:
            kept = self._new(n_tokens, max_tokens, settled)
            try:
                with self._gone_if_failed(kept):
                    kept.session.prepare(n_tokens, max_tokens, stays_open=True)
            except ResourceError:
                if not self.room.free_some():
                    raise
                continue
            assert kept.runner is not None and kept.runner.max_context >= min(context, n_tokens)
            return kept

    def _new(
        self, n_tokens: int, max_tokens: int, plan: RunPlan, spared: Conversation | None = None
    ) -> Conversation:
        """A conversation without a runner; the ones used least lately go for its room."""
        expected = self.room.make_for_new(n_tokens, max_tokens, spared)
        draft = None if self.draft is None else self.draft.for_conversation()
        kept = Conversation(self.model, plan, self._opened, draft, open_context=self._open_context)
        kept.expect(n_tokens, expected)
        self.room.kept.append(kept)
        return kept
