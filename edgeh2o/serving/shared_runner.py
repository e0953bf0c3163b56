"""A runner of one of several requests: its calls go through the scheduler.

A prompt is read in calls of one chunk each (``call_grid``), so that others get their turns and a
request that is given up ends soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..engine.full_context import allow_eviction
from ..runners.counted import CountedRunner
from ..runners.runner_calls import n_evicted
from .call_grid import CallGrid, PromptShape, ReadPlaces
from .saved_state import SavedPlaces, pack_state, unpack_state
from .scheduler import CancelledError, Scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..engine.drafting import CallCosts
    from ..runners.base import OnLayer

# Marks lie at most this share of their distance to the prompt's end apart: departures are mostly
# near the end, where the question is.
MARK_SPACING = 8
# Of what a session takes, what the calls of all sessions on the CPU write to, one at a time.
SHARED_PARTS = ("activations", "scratch")
_NO_TOKENS = np.empty(0, np.int32)


class SharedRunner(CountedRunner):
    """A ``Runner`` (edgeh2o/runners/base.py) whose calls wait for their turns.

    ``expect_prompt`` is called before each prompt. ``cancel`` ends the prompt in progress, between
    two layers at the latest, with a CancelledError where it is read.
    """

    def __init__(
        self,
        runner: Any,
        scheduler: Scheduler,
        workspace: _core.Workspace | None,
        grid: CallGrid,
    ) -> None:
        self.runner = self._counted = runner
        self.grid = grid
        self._scheduler = scheduler
        self._workspace = workspace
        self._shape = PromptShape(0)  # of the prompt in progress
        self._whole_end: int | None = None  # of the prompt that was read to its end
        self._tokens: list[int] = []
        self._places = ReadPlaces()
        self._deferred = _NO_TOKENS  # handed over, and read with what comes next
        self._ahead = _NO_TOKENS  # looked at by ``decode_batch``
        self._is_cancelled = Event()
        self._reason = ""
        self._evicts = False
        self._mark_bytes = 0
        self.most_tokens = 0  # held at once so far: rows beyond take no memory yet
        self.prompt_logits: NDArray[np.float32] | None = None
        self._hidden: NDArray[np.float32] | None = None  # of the prompt's latest calls

    def expect_prompt(self, shape: PromptShape) -> None:
        """A prompt of such a shape, cached tokens included, is about to be read."""
        self._shape = shape
        self._deferred = _NO_TOKENS
        self._is_cancelled.clear()

    def cancel(self, reason: str) -> None:
        """From any thread."""
        self._reason = reason
        self._is_cancelled.set()

    def leave(self) -> None:
        """No more tokens will be decoded until the next prompt."""
        self._scheduler.leave(self.runner)

    @property
    def places(self) -> ReadPlaces:
        """Where others may begin; good also while this one is at work."""
        return self._places

    @property
    def token_ids(self) -> Sequence[int]:
        return self._tokens

    @property
    def position(self) -> int:
        return int(self.runner.position)

    @property
    def n_evicted(self) -> int:
        return n_evicted(self.runner)

    def allow_eviction(self, is_allowed: bool) -> None:
        if is_allowed != self._evicts:
            self._scheduler.call(lambda: allow_eviction(self.runner, is_allowed))
            self._evicts = is_allowed

    def evict(self, n: int) -> None:
        self._require_wanted()
        self._scheduler.call(lambda: self.runner.evict(n))
        self._places, self.prompt_logits = ReadPlaces(), None
        self._mark_bytes = 0

    @property
    def max_context(self) -> int:
        return int(self.runner.max_context)

    @property
    def batch_size(self) -> int:
        return int(self.runner.batch_size)

    @property
    def chunk_size(self) -> int:
        return int(self.runner.chunk_size)

    @property
    def max_decode_tokens(self) -> int:
        """As many as the runner takes, whoever decodes beside it."""
        return int(self.runner.max_decode_tokens)

    @property
    def keeps_hidden(self) -> bool:
        """See ``HiddenRunner``. AttributeError of a runner that is none."""
        return bool(self.runner.keeps_hidden)

    @keeps_hidden.setter
    def keeps_hidden(self, is_wanted: bool) -> None:
        self.runner.keeps_hidden = is_wanted

    @property
    def keeps_last_hidden(self) -> bool:
        return bool(self.runner.keeps_last_hidden)

    @keeps_last_hidden.setter
    def keeps_last_hidden(self, is_wanted: bool) -> None:
        self.runner.keeps_last_hidden = is_wanted

    @property
    def hidden_layers(self) -> list[int]:
        layers: list[int] = self.runner.hidden_layers
        return layers

    @hidden_layers.setter
    def hidden_layers(self, layers: list[int]) -> None:
        self.runner.hidden_layers = layers

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """Of the latest call's tokens [n, model_dim], those that were read."""
        rows: NDArray[np.float32] | None = self.runner.hidden
        return rows if self._hidden is None else self._hidden

    @property
    def call_costs(self) -> CallCosts:
        """What guesses cost, in the steps that all share."""
        return self._scheduler.costs

    @property
    def vocab_size(self) -> int:
        return int(self.runner.vocab_size)

    @property
    def policy(self) -> _core.SparsePolicy:
        policy: _core.SparsePolicy = self.runner.policy
        return policy

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Allocated for this one alone: what others write to as well does not go with it."""
        memory: Mapping[str, int] = self.runner.memory_bytes
        if self._workspace is None:
            return memory
        return {name: size for name, size in memory.items() if name not in SHARED_PARTS}

    @property
    def held_bytes(self) -> int:
        """Memory that it takes now, also while it is at work; rows never written take none."""
        resident: int | None = getattr(self.runner, "resident_bytes", None)
        if resident is None:  # a runner of another kind, or a system that does not tell
            sizes, share = self.memory_bytes, self.most_tokens / self.max_context
            resident = int(sizes.get("kv_cache", 0) * share)
            resident += sizes.get("scores", 0) + sizes.get("recurrent_state", 0)
        return resident + self._mark_bytes

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
    ) -> NDArray[np.float32] | None:
        """In calls of the grid.

        What lies behind the last place at which the grid lets a call end is read with the tokens
        of the next call.
        """
        begin = self.position
        if self._whole_end is not None and begin > 0:
            self._places = self._places.with_turn(begin)
        self.prompt_logits = self._whole_end = None
        tokens, self._deferred = np.concatenate([self._deferred, tokens]), _NO_TOKENS
        n_tokens, turn = len(tokens), self._places.turns[-1]
        ends = self.grid.ends(begin, begin + n_tokens, self._shape, turn, is_last=is_last)
        question = self.grid.question_of(self._shape, turn)
        logits = None
        hidden = []
        with self._scheduler.reading():
            for first, end in pairwise([begin, *ends]):
                ends_prompt = is_last and end == begin + n_tokens
                part = tokens[first - begin : end - begin]
                place = first - begin, n_tokens
                logits = self._read(part, *place, ends_prompt, stays_open, on_layer)
                rows = self.runner.hidden if getattr(self.runner, "keeps_hidden", False) else None
                if rows is not None:
                    hidden.append(rows)
                if end == question:
                    self._places = self._places.with_question(end)
        self._hidden = np.concatenate(hidden) if hidden else None
        if not is_last:
            self._deferred = tokens[(ends[-1] if ends else begin) - begin :]
            return None
        self._whole_end = len(self._tokens)
        if stays_open:
            self.prompt_logits = logits
        return logits

    def _read(
        self,
        tokens: NDArray[np.int32],
        first: int,
        n_all: int,
        ends_prompt: bool,
        stays_open: bool,
        on_layer: OnLayer | None,
    ) -> NDArray[np.float32] | None:
        """One call: so many tokens from ``first`` on of ``n_all``, when its turn comes."""

        def watch(done: int, total: int) -> None:
            self._require_wanted()
            if on_layer is not None:
                on_layer(first * total + len(tokens) * done, n_all * total)

        def read() -> NDArray[np.float32] | None:
            self._require_wanted()
            self._mark()  # where the prompt goes on: what an interrupted call goes back to
            result: NDArray[np.float32] | None = self.runner.prefill(
                tokens, is_last=ends_prompt, stays_open=stays_open, on_layer=watch
            )
            self._tokens += tokens.tolist()
            self.most_tokens = max(self.most_tokens, len(self._tokens))
            return result

        return self._scheduler.call(read)

    def _mark(self) -> None:
        position, places = self.position, self._places
        last = places.marks[-1] if places.marks else -1
        distance = max(0, self._shape.n_tokens - position)
        is_due = last < 0 or position - last >= max(1, distance // MARK_SPACING)
        is_question = position > last and position in places.questions
        if (is_due or is_question) and self.runner.mark():
            # Others may have been dropped for it; the runner has some of its own besides.
            self._places = places.with_mark(position).keeping(self.runner.marks)
            self._count_marks()

    def _count_marks(self) -> None:
        """Where nothing else changes them: in the scheduler's thread."""
        self._mark_bytes = int(getattr(self.runner, "mark_bytes", 0))

    def _require_wanted(self) -> None:
        if self._is_cancelled.is_set():
            raise CancelledError(self._reason)

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._scheduler.call(
            lambda: self.runner.row_logits(first, n_rows)
        )
        return rows

    def decode(self, token: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.decode_batch(np.array([token], np.int32))[0]
        return logits

    def decode_batch(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        self._require_wanted()
        self._hidden = None
        logits = self._scheduler.decode(self.runner, tokens, self._workspace)
        self._append(tokens[:1])
        self._ahead = tokens[1:]
        return logits

    def accept(self, n: int) -> None:
        self.runner.accept(n)
        self._append(self._ahead[:n])
        self._ahead = self._ahead[n:]

    def _append(self, tokens: NDArray[np.int32]) -> None:
        self._tokens += tokens.tolist()
        self.most_tokens = max(self.most_tokens, len(self._tokens))

    def reset(self) -> None:
        self._scheduler.call(self.runner.reset)
        self._forget()
        self._mark_bytes = 0

    def _forget(self) -> None:
        self._tokens, self._places = [], ReadPlaces()
        self.prompt_logits = self._whole_end = None

    def rewind(self, position: int) -> None:
        if self._whole_end is None or position < self._whole_end:
            self.prompt_logits = self._whole_end = None

        def rewind() -> None:
            self.runner.rewind(position)
            self._count_marks()

        self._scheduler.call(rewind)
        del self._tokens[position:]
        self._places = self._places.up_to(position)

    def mark(self) -> bool:
        """What was read is marked while it is read; this adds nothing."""
        return bool(self._places.marks)

    def find_mark(self, position: int) -> int:
        """As a runner's, but only where a whole read of the expected prompt ends a call too.

        Where an earlier prompt ended, only what goes on with its answer goes on too: chunks begin
        there that a whole read of another prompt does not have.
        """
        position = min(position, len(self._tokens))
        whole_end = self._whole_end
        if whole_end is not None:
            is_same = position == whole_end == self._shape.n_tokens
            if position > whole_end or is_same:
                return int(self.runner.find_mark(position))
            position = min(position, whole_end - 1)
        while position > 0:
            found = int(self.runner.find_mark(position))
            if found == 0 or self.grid.allows(found, self._shape, self._places):
                return found
            position = found - 1
        return 0

    def prepare_to_save(self) -> None:
        """Lets ``find_mark`` name the end of what is held, whatever prompt was expected last."""
        self._shape = PromptShape(len(self._tokens))

    @property
    def mark_states(self) -> Sequence[bytes]:
        states: Sequence[bytes] = self._scheduler.call(lambda: self.runner.mark_states)
        return states

    def save_state(self) -> bytes:
        """That of the runner, and where prompts were read."""
        return self._scheduler.call(self._save_state)

    def _save_state(self) -> bytes:
        return pack_state(SavedPlaces(self._places, self._whole_end), self.runner.save_state())

    def load_state(
        self, state: bytes, token_ids: Sequence[int], marks: Sequence[bytes] = ()
    ) -> None:
        """Takes up what ``save_state`` gave. Raises ValueError, and forgets, for anything else."""
        self._forget()
        saved, own = unpack_state(state, len(token_ids))

        def load() -> None:
            self.runner.load_state(own, token_ids, marks)
            self._count_marks()
            if not {*saved.places.marks} <= {*self.runner.marks}:
                self.runner.reset()
                raise ValueError("its marks are not where it says")

        self._scheduler.call(load)
        self._tokens = list(token_ids)
        self._places, self._whole_end = saved.places, saved.whole_end
        self.most_tokens = max(self.most_tokens, len(self._tokens))

    def cached_rows(self) -> Sequence[NDArray[np.uint8]]:
        rows: Sequence[NDArray[np.uint8]] = self._scheduler.call(self.runner.cached_rows)
        return rows

    @property
    def can_be_copied(self) -> bool:
        """Whether others can ``copy_from`` this one."""
        return hasattr(self.runner, "copy_from")

    def copy_from(self, other: SharedRunner, position: int) -> None:
        """Takes up the beginning of another runner, which may be at work, up to a mark of it."""
        self._forget()

        def copy() -> None:
            places = other.places
            self.runner.copy_from(other.runner, position)
            self._count_marks()
            # Of what was copied: the other may have gone back since it was looked at.
            self._tokens = list(self.runner.token_ids)
            marks = tuple(self.runner.marks)
            self._places = ReadPlaces(marks, places.turns, places.questions).up_to(position)

        self._scheduler.call(copy)
        self.most_tokens = max(self.most_tokens, position)
