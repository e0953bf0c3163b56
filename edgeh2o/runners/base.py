"""The protocols between the generation loop and whatever computes logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import FormatError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .._core import SparsePolicy

OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """The sizes that fix what a session allocates, in tokens, and its number types.

    ``cache_type`` is that of keys and values, or both as in "q8_0/f16".
    ``precision`` is that of the products of prefill attention (``ATTENTION_PRECISIONS``);
    ``threads`` of the CPU share its work.
    ``all_rows`` is for evaluation: the last layer is computed for all tokens of a prompt, for
    ``row_logits`` and for a look at what was chosen there; else for its last token only, where that
    is all that an answer needs.

    Of a prefill call of a batch so many ``checked_rows`` in each layer, and of a shorter one in
    proportion, also read everything; the square of what that changes, relative to that of the
    dense output, is the layer's error. Where it is above ``error_limit`` (16 times that in the last
    third of the layers), the memory sets that err most are read again, densely, and so is the rest
    of the prompt by them; once half of all was, the layers to come are read densely at once.

    ``adapter_scales`` are what the adapters of the model count in its prompts (LoRA); none: as the
    model was opened with them.
    """

    max_context: int
    batch_size: int
    chunk_size: int
    cache_type: str
    precision: str = "f32"
    threads: int = 1
    all_rows: bool = False
    checked_rows: int = 0
    error_limit: float = math.inf
    adapter_scales: tuple[float, ...] = ()

    def sizes(self) -> dict[str, Any]:
        """All of it but the adapters, by name."""
        return {name: value for name, value in asdict(self).items() if name != "adapter_scales"}


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """What drafts read of a model beside its tokens, a row for each.

    The residual stream before ``layers``, ascending, one beside the other; none: what logits are
    made of, of the last token of a prompt and those behind it alone with ``is_last_only``.
    """

    layers: tuple[int, ...] = ()
    is_last_only: bool = False


@dataclass(frozen=True, slots=True)
class RunnerState:
    """All that later calls of a runner depend on, but the rows of its cache.

    ``token_ids`` are the tokens in the cache, ``core`` is opaque, ``prompt_logits`` [vocab_size]
    are those after the last prompt token, ``marks`` what is noted at each mark.
    """

    token_ids: tuple[int, ...]
    core: bytes
    prompt_logits: NDArray[np.float32] | None
    marks: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, runner: Runner) -> RunnerState:
        """What ``runner`` holds. Raises UsageError if its attention's rule cannot be saved."""
        try:
            core = runner.save_state()
        except ValueError as error:
            raise UsageError(f"the session cannot be saved: {error}") from None
        return cls(tuple(runner.token_ids), core, runner.prompt_logits, tuple(runner.mark_states))

    def restore(self, runner: Runner) -> None:
        """Lets ``runner`` take this up; the caller then fills its ``cached_rows``.

        Raises FormatError, and forgets the prompt, for what such a runner could not have had.
        """
        try:
            runner.load_state(self.core, self.token_ids, self.marks)
        except ValueError as error:
            raise FormatError(f"the saved state does not fit: {error}") from None
        runner.prompt_logits = self.prompt_logits

    @classmethod
    def copy(cls, old: Runner, new: Runner) -> bool:
        """Lets ``new`` take up all that ``old`` holds; False if that cannot be saved."""
        try:
            state = cls.of(old)
        except UsageError:
            return False
        state.restore(new)
        for rows, copy in zip(old.cached_rows(), new.cached_rows(), strict=True):
            copy[:] = rows
        return True


class Runner(Protocol):
    """The state of one prompt: a key-value cache, scores, and the position after the last token.

    A runner allocates when it is made, not while it runs.
    """

    @property
    def position(self) -> int:
        """Tokens in the cache."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens in the cache."""

    @property
    def prefill_end(self) -> int:
        """Position after the latest ``prefill``."""

    prompt_logits: NDArray[np.float32] | None
    """Logits [vocab_size] at ``prefill_end`` of a prompt that stays open, else None."""

    @property
    def max_context(self) -> int:
        """Tokens that the cache can hold."""

    @property
    def batch_size(self) -> int:
        """Most tokens of one ``prefill`` call."""

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk; calls before the last one take a multiple of it."""

    @property
    def max_decode_tokens(self) -> int:
        """Most tokens of one decode call; a runner that takes several is a ``BatchRunner``."""

    @property
    def vocab_size(self) -> int:
        """Length of the logits."""

    @property
    def pairs_computed(self) -> int:
        """Query-key pairs computed for this prompt, averaged over KV heads and layers.

        A last layer that attends for the last token only is left out.
        """

    @property
    def pairs_dense(self) -> int:
        """Query-key pairs of this prompt without a sparse rule: N (N + 1) / 2.

        Averaged over layers; fewer where layers have a sliding window.
        """

    @property
    def decode_bytes(self) -> int:
        """Bytes that decode calls have read of the cache, since the runner was made.

        And of what a rule chooses by. Rows that several tokens of a call share count once. 0 on a
        GPU, which does not count.
        """

    @property
    def policy(self) -> SparsePolicy:
        """The rule that chooses what this prompt's chunks read, for inspection."""

    @property
    def error_sums(self) -> NDArray[np.float64]:
        """What ``checked_rows`` measured since the prompt began, [n_layers, 2]; zeros if nothing.

        Sums of squares, over rows and heads: of sparse less dense outputs, and of dense ones.
        """

    @property
    def n_dense_reads(self) -> int:
        """Memory sets of calls that were read densely for their error since the prompt began."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Allocated bytes by purpose."""

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
    ) -> NDArray[np.float32] | None:
        """Reads the next 1 to ``batch_size`` prompt tokens [n].

        ``is_last`` marks the end of the prompt and returns the logits [vocab_size] of its last
        token. With ``stays_open`` another prompt may go on from there, after some ``decode``:
        the next turn of a chat. ``on_layer(done, total)`` is called after each layer. An
        exception, a KeyboardInterrupt too, leaves a state that needs ``reset`` or ``rewind`` to
        a mark.
        """

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        """Logits [n_rows, vocab_size] of tokens of the latest ``prefill`` call, from ``first`` on.

        For evaluation, which reads them in blocks: those of a whole batch may not fit in memory.
        Needs a session with ``all_rows``.
        """

    def decode(self, token: int) -> NDArray[np.float32]:
        """Appends one token; returns the logits [vocab_size], valid until the next call."""

    def reset(self) -> None:
        """Forgets the prompt."""

    def rewind(self, position: int) -> None:
        """Forgets the tokens from ``position`` on.

        ValueError unless that is ``prefill_end`` or later, marked, or 0. A state that an exception
        left is whole again afterwards, if it is not later than where that call began.
        """

    def mark(self) -> bool:
        """Notes the state at the position, so that ``rewind`` can go back to it.

        False if the attention's rule cannot be saved.
        """

    def find_mark(self, position: int) -> int:
        """The last position up to ``position`` that ``rewind`` can go to."""

    @property
    def mark_states(self) -> Sequence[bytes]:
        """What is noted at each mark, in their order."""

    def save_state(self) -> bytes:
        """What later calls depend on, but tokens, cached rows and marks.

        ValueError if that cannot be.
        """

    def load_state(
        self, state: bytes, token_ids: Sequence[int], marks: Sequence[bytes] = ()
    ) -> None:
        """Takes up a saved prompt and its ``mark_states``, but not its rows.

        ValueError, and no prompt, if it is bad.
        """

    def cached_rows(self) -> Sequence[NDArray[np.uint8]]:
        """Writable views of all cached rows of the tokens, in a fixed order.

        They are valid until the position changes.
        """


class BatchRunner(Runner, Protocol):
    """A runner whose tokens give the same bits whether they go one by one or together."""

    def decode_batch(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Appends the first of 1 to ``max_decode_tokens`` tokens [n], and looks at the others.

        Returns the logits [n, vocab_size] after each, or after fewer of them, the first at least.
        The others follow only if ``accept`` says so.
        ValueError, before anything is written, for tokens that do not fit.
        """

    def accept(self, n: int) -> None:
        """Appends the first ``n`` tokens that the latest call has looked at, without work.

        ValueError for more than are left; every call but ``accept`` forgets them.
        """


class HiddenRunner(BatchRunner, Protocol):
    """A runner that shows what its logits are made of, the normed rows behind the last layer.

    That of a layer which guesses tokens ahead has such a row beside every token that it reads.
    """

    keeps_hidden: bool
    """Whether calls leave ``hidden``; what else they compute stays the same, bit by bit."""

    keeps_last_hidden: bool
    hidden_layers: list[int]
    """Which rows: see ``HiddenRows``."""

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """Those of the latest call's tokens [n, width], or of the last of them."""

    def encode(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of rows [n, width] of another model those [n, model_dim] that stand beside tokens."""

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        """``hidden`` [n, model_dim] stands beside the tokens, here and below."""

    def decode(
        self, token: int, hidden: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]: ...

    def decode_batch(
        self, tokens: NDArray[np.int32], hidden: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]: ...


class EmbeddingRunner(Runner, Protocol):
    """A runner that reads prompts for what their logits would be made of."""

    def embed(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        n_rows: int,
        on_layer: OnLayer | None = None,
    ) -> NDArray[np.float32]:
        """As ``prefill``; the hidden rows [n_rows, model_dim] of the last tokens, and no logits.

        A last layer whose rule ends dense reads densely for all of them. ValueError for more rows
        than tokens.
        """


class EvictingRunner(Runner, Protocol):
    """A runner whose cache can drop tokens, of every KV head others, and go on.

    ``position``, and all others but ``max_context``, count those that were dropped too, and
    ``token_ids`` has them; nothing before the latest eviction can be gone back to.
    """

    @property
    def n_evicted(self) -> int:
        """Tokens that were dropped since ``reset``."""

    def allow_eviction(self, is_allowed: bool) -> None:
        """Notes from now on, or no more, what keys receive of attention, which takes memory.

        While it does, a decode call takes one token. ValueError, with the cure, for a model, a
        cache type or a rule that this does not go with.
        """

    def evict(self, n: int) -> None:
        """Drops ``n`` tokens. ValueError for as many as there are."""
