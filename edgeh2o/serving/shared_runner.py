"""Runners of several requests on one copy of the weights: their calls go through the scheduler.

A prompt is read in calls of one chunk each, so that others get their turns and a request that is
given up ends soon. Where a chunk begins depends on where the prompt's part began, and the last call
on the end alone, never on what was found in the cache: what is read after a mark is what a whole
read would have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

from .. import _core
from .scheduler import CancelledError, Scheduler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from ..engine.models import LoadedModel
    from ..runners.base import OnLayer, SessionShape
    from ..tokenizer import Tokenizer

# Tokens that the last call of a prompt has at least, where there are as many: its last ones may
# read everything, as far as their call reaches.
LEAST_LAST_CALL = 64
# Marks lie at most this share of their distance to the prompt's end apart: departures are mostly
# near the end, where the question is.
MARK_SPACING = 8


class SharedModel:
    """A loaded model whose runners take turns."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        self.model, self.scheduler = model, scheduler

    def start_session(self, attention: SparseAttentionConfig, shape: SessionShape) -> SharedRunner:
        """As that of the model; the tail that reads everything is part of the last call."""
        least = max(LEAST_LAST_CALL, int(getattr(attention, "tail", 0)))
        runner = self.scheduler.call(lambda: self.model.start_session(attention, shape))
        workspace = None
        if isinstance(runner, _core.Sequence):
            workspace = runner.workspace
        return SharedRunner(runner, self.scheduler, workspace, min(least, shape.chunk_size))

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def chat_template(self) -> object:
        return self.model.chat_template

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def shows_attention(self) -> bool:
        return self.model.shows_attention

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return self.model.estimate_session_bytes(attention, shape)

    def __getattr__(self, name: str) -> Any:  # what only some models have, for profiles
        return getattr(self.model, name)


class SharedRunner:
    """A ``Runner`` (edgeh2o/runners/base.py) whose calls wait for their turns.

    ``expect_prompt`` is called before each prompt. ``cancel`` ends the prompt in progress, between
    two layers at the latest, with a CancelledError where it is read.
    """

    def __init__(
        self,
        runner: Any,
        scheduler: Scheduler,
        workspace: _core.Workspace | None,
        least_last_call: int,
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._workspace = workspace
        self.least_last_call = least_last_call
        self._end = 0  # of the prompt in progress
        self._whole_end: int | None = None  # of the prompt that was read to its end
        self._tokens: list[int] = []
        self._marks: tuple[int, ...] = ()
        self._is_cancelled = Event()
        self._reason = ""
        self.most_tokens = 0  # held at once so far: rows beyond take no memory yet
        self.prompt_logits: NDArray[np.float32] | None = None

    def expect_prompt(self, n_tokens: int) -> None:
        """A prompt of so many tokens, cached ones included, is about to be read."""
        self._end = n_tokens
        self._is_cancelled.clear()

    def cancel(self, reason: str) -> None:
        """From any thread."""
        self._reason = reason
        self._is_cancelled.set()

    def leave(self) -> None:
        """No more tokens will be decoded until the next prompt."""
        self._scheduler.leave(self.runner)

    @property
    def marks(self) -> tuple[int, ...]:
        """Where others may begin, ascending; good also while this one is at work."""
        return self._marks

    @property
    def token_ids(self) -> Sequence[int]:
        return self._tokens

    @property
    def position(self) -> int:
        return int(self.runner.position)

    @property
    def prefill_end(self) -> int:
        return int(self.runner.prefill_end)

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
        """One: the steps of several prompts go together, not several tokens of one."""
        return 1

    @property
    def vocab_size(self) -> int:
        return int(self.runner.vocab_size)

    @property
    def pairs_computed(self) -> int:
        return int(self.runner.pairs_computed)

    @property
    def pairs_dense(self) -> int:
        return int(self.runner.pairs_dense)

    @property
    def error_sums(self) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = self.runner.error_sums
        return sums

    @property
    def n_dense_reads(self) -> int:
        return int(self.runner.n_dense_reads)

    @property
    def policy(self) -> _core.SparsePolicy:
        policy: _core.SparsePolicy = self.runner.policy
        return policy

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        memory: Mapping[str, int] = self.runner.memory_bytes
        return memory

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
        on_attention: Callable[..., None] | None = None,
    ) -> NDArray[np.float32] | None:
        """In calls of a chunk each; in one where ``on_attention`` looks on."""
        self.prompt_logits = self._whole_end = None
        logits = None
        n_tokens = len(tokens)
        extra = {} if on_attention is None else {"on_attention": on_attention}
        ends = [n_tokens] if extra else self._plan(n_tokens, is_last=is_last)
        begin = 0
        for end in ends:
            part, ends_prompt = tokens[begin:end], is_last and end == n_tokens

            def watch(done: int, total: int, begin: int = begin, end: int = end) -> None:
                self._require_wanted()
                if on_layer is not None:
                    on_layer(begin * total + (end - begin) * done, n_tokens * total)

            def read(
                part: NDArray[np.int32] = part,
                ends_prompt: bool = ends_prompt,
                watch: OnLayer = watch,
            ) -> NDArray[np.float32] | None:
                self._require_wanted()
                self._mark()  # where the prompt goes on: what an interrupted call goes back to
                result: NDArray[np.float32] | None = self.runner.prefill(
                    part, is_last=ends_prompt, stays_open=stays_open, on_layer=watch, **extra
                )
                self._tokens += part.tolist()
                self.most_tokens = max(self.most_tokens, len(self._tokens))
                return result

            logits = self._scheduler.call(read)
            begin = end
        if is_last:
            self._whole_end = len(self._tokens)
        if is_last and stays_open:
            self.prompt_logits = logits
        return logits

    def _plan(self, n_tokens: int, *, is_last: bool) -> list[int]:
        """Where calls end that read the next ``n_tokens`` of the prompt."""
        chunk = self.chunk_size
        ends = list(range(chunk, n_tokens, chunk))
        if is_last and ends and n_tokens - ends[-1] < self.least_last_call:
            ends.pop()
        return [*ends, n_tokens]

    def _mark(self) -> None:
        position = self.position
        last = self._marks[-1] if self._marks else -1
        distance = max(0, self._end - position)
        is_due = last < 0 or position - last >= max(1, distance // MARK_SPACING)
        if is_due and self.runner.mark():
            # Others may have been dropped for it; the runner has some of its own besides.
            left = set(self.runner.marks)
            self._marks = tuple(mark for mark in (*self._marks, position) if mark in left)

    def _require_wanted(self) -> None:
        if self._is_cancelled.is_set():
            raise CancelledError(self._reason)

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._scheduler.call(
            lambda: self.runner.row_logits(first, n_rows)
        )
        return rows

    def decode(self, token: int) -> NDArray[np.float32]:
        self._require_wanted()
        logits = self._scheduler.decode(self.runner, token, self._workspace)
        self._tokens.append(token)
        self.most_tokens = max(self.most_tokens, len(self._tokens))
        return logits

    def reset(self) -> None:
        self._scheduler.call(self.runner.reset)
        self._forget()

    def _forget(self) -> None:
        self._tokens, self._marks = [], ()
        self.prompt_logits = self._whole_end = None

    def rewind(self, position: int) -> None:
        if self._whole_end is None or position < self._whole_end:
            self.prompt_logits = self._whole_end = None
        self._scheduler.call(lambda: self.runner.rewind(position))
        del self._tokens[position:]
        self._marks = tuple(mark for mark in self._marks if mark <= position)

    def mark(self) -> bool:
        """What was read is marked while it is read; this adds nothing."""
        return bool(self._marks)

    def find_mark(self, position: int) -> int:
        """As a runner's, but no later than what leaves the last call of the prompt its tokens.

        Where an earlier prompt ended, only what goes on with its answer goes on too: chunks begin
        there that a whole read of another prompt does not have.
        """
        position = min(position, len(self._tokens))
        whole_end = self._whole_end
        if whole_end is not None and (position > whole_end or position == whole_end == self._end):
            return int(self.runner.find_mark(position))
        position = min(position, self._end - self.least_last_call)
        if whole_end is not None:
            position = min(position, whole_end - 1)
        return int(self.runner.find_mark(max(0, position)))

    def save_state(self) -> bytes:
        state: bytes = self.runner.save_state()
        return state

    def load_state(self, state: bytes, token_ids: Sequence[int]) -> None:
        self._forget()
        self.runner.load_state(state, token_ids)
        self._tokens = list(token_ids)

    def cached_rows(self) -> Sequence[NDArray[np.uint8]]:
        rows: Sequence[NDArray[np.uint8]] = self.runner.cached_rows()
        return rows

    @property
    def can_be_copied(self) -> bool:
        """Whether others can ``copy_from`` this one."""
        return hasattr(self.runner, "copy_from")

    def copy_from(self, other: SharedRunner, position: int) -> None:
        """Takes up the beginning of another runner, which may be at work, up to a mark of it."""
        self._forget()

        def copy() -> None:
            self.runner.copy_from(other.runner, position)
            # Of what was copied: the other may have gone back since it was looked at.
            self._tokens, self._marks = list(self.runner.token_ids), tuple(self.runner.marks)

        self._scheduler.call(copy)
        self.most_tokens = max(self.most_tokens, position)
