"""Drafts of layers that read tokens beside hidden rows of the model (MTP, EAGLE-3, DFlash)."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..config import MTP_DRAFT
from ..runners.base import HiddenRows, SessionShape
from ..runners.runner_calls import use_small_pages
from ..sampling_config import DRAFT_OFF, SamplingParams
from .draft_file import DraftFile
from .memory_fit import find_room, require_fit
from .paired_text import CachedText, PairedText
from .writing_drafter import WritingDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..runners.base import HiddenRunner, Runner
    from ..runners.drafting_layer import DraftingLayer, DraftingLayerFile
    from ..runners.native import NativeModel
    from .drafting import CallCosts, Drafter
    from .models import LoadedModel
    from .plan import RunPlan

# Tokens of one call of the layer that reads a prompt: keys and values alone are computed, so that
# longer calls are no faster, and take memory.
BATCH_TOKENS = 256
# Hidden rows that may wait until a draft is wanted: with the next one as many as a call takes.
MOST_PENDING = 15
STEP_COST = 0.1  # of a drafted token in calls of the model, before it is measured


def own_draft_file(file: DraftingLayerFile, plan: RunPlan) -> DraftFile:
    """Such layers of a file that is open, whose model runs by ``plan``."""

    def load(model: LoadedModel) -> OwnDraft:
        return OwnDraft(cast("NativeModel", model).load_drafting_layer(file), plan)

    return DraftFile(file, partial(estimate_bytes, file, plan), load)


def draft_shape(plan: RunPlan, context: int) -> SessionShape:
    """Sizes of the layer's sequence for texts of ``context`` tokens."""
    shape = plan.shape(min(context, plan.config.context_length))
    batch = min(shape.batch_size, BATCH_TOKENS)
    chunk = min(shape.chunk_size, batch)
    return replace(
        shape, batch_size=batch - batch % chunk, chunk_size=chunk, all_rows=False, checked_rows=0
    )


def estimate_bytes(layer: DraftingLayerFile | DraftingLayer, plan: RunPlan, context: int) -> int:
    """What the layer's sequence takes, and the hidden rows of a call of the model."""
    own = layer.estimate_session_bytes(draft_shape(plan, context))
    row_bytes = 4 * (layer.config.features_dim or layer.config.model_dim)
    return sum(own.values()) + plan.shape(context).batch_size * row_bytes


class OwnDraft:
    """The loaded layer, its sequence and what it has read: a ``DraftProvider`` and its source."""

    def __init__(self, layer: DraftingLayer, plan: RunPlan) -> None:
        self._layer, self._plan = layer, plan
        self.hidden_rows = HiddenRows(layer.drafter.hidden_layers)
        self._wrap: Callable[[HiddenRunner], HiddenRunner] = lambda runner: runner
        self._may_draft: Callable[[], bool] = lambda: True
        self._context = 0  # that the sequence has room for
        self._paired: PairedText | None = None

    def share(
        self, wrap: Callable[[HiddenRunner], HiddenRunner], may_draft: Callable[[], bool]
    ) -> None:
        """Before the first draft: calls of its sequence are those of what ``wrap`` makes of it.

        ``may_draft`` says whether there is time for one now.
        """
        self._wrap, self._may_draft = wrap, may_draft

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What it has allocated, by purpose."""
        session = estimate_bytes(self._layer, self._plan, self._context) if self._context else 0
        return {"draft_weights": self._layer.weight_bytes, "draft_session": session}

    def prepared(self, sampling: SamplingParams, context: int) -> OwnDraft | None:
        """See ``DraftProvider``. Raises ResourceError."""
        if sampling.draft_tokens == DRAFT_OFF:
            return None
        if self._paired is None or context > self._context:
            require_fit(context, self._sizes, find_room(self._plan.threads))
            runner = cast(
                "HiddenRunner", self._layer.start_session(draft_shape(self._plan, context))
            )
            use_small_pages(runner)  # it may never read as much
            runner = self._wrap(runner)
            if self._paired is None:
                self._paired = self._begin_text(runner)
            else:
                self._paired.move_to(runner)
            self._context = context
        return self

    def _begin_text(self, runner: HiddenRunner) -> PairedText:
        config = self._layer.config
        if self._layer.drafter.block_size:
            return CachedText(runner, config.model_dim)
        return PairedText(runner, config.model_dim, encodes_rows=config.features_dim > 0)

    def _sizes(self, context: int) -> Mapping[str, int]:
        return {"draft_session": estimate_bytes(self._layer, self._plan, context)}

    def make_drafter(
        self, runner: Runner, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
    ) -> Drafter:
        """An ``OwnDrafter``; see ``DraftSource``. Raises ValueError before ``prepared``."""
        if self._paired is None:
            raise ValueError("what drafts has no sequence yet")
        drafter = self._layer.drafter
        kind: Callable[..., OwnDrafter] = OwnDrafter
        if drafter.block_size:
            kind = partial(
                BlockDrafter, block_size=drafter.block_size, mask_token=drafter.mask_token
            )
        return kind(
            self._paired,
            cast("HiddenRunner", runner),
            prompt,
            self._layer.config.vocab_size,
            costs,
            length,
            self._may_draft,
            name=self._layer.name,
            guessed=drafter.guessed,
        )


class OwnDrafter(WritingDrafter):
    """Drafts what the layer would draw after the text, from the same random numbers.

    ``paired`` is what it has read, ``target`` the model's runner, which keeps hidden rows, and
    ``prompt`` [n] the text; ``vocab_size`` is the model's, of which the layer guesses those of
    ``guessed``, or the first. While ``may_draft`` says no it only reads.
    """

    def __init__(
        self,
        paired: PairedText,
        target: HiddenRunner,
        prompt: NDArray[np.int32],
        vocab_size: int,
        costs: CallCosts,
        length: int | None,
        may_draft: Callable[[], bool] = lambda: True,
        *,
        name: str = MTP_DRAFT,
        guessed: Sequence[int] | None = None,
    ) -> None:
        super().__init__(name, vocab_size, costs, length, STEP_COST)
        self._guessed = None if guessed is None else np.asarray(guessed)
        self._paired, self._target, self._may_draft = paired, target, may_draft
        # Tokens that are never guessed have no chance, so that all else is that of the model.
        self._logits = np.full(vocab_size, -np.inf, np.float32)
        paired.begin(prompt.tolist())

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        self._guesses, self._pause = [], 0
        self._paired.begin(tokens.tolist())
        rows = self._target.hidden
        if rows is not None:
            self._paired.take_rows(len(tokens) - len(rows), rows)

    def push(self, token: int) -> None:
        self._paired.text.append(token)
        self._learn(token)

    def note_rows(self, first: int) -> None:
        rows, paired = self._target.hidden, self._paired
        if rows is None:
            return
        paired.take_rows(first, rows)
        if paired.n_pending <= MOST_PENDING:
            return
        with self._at_work():
            end = first + len(rows)
            if end == self._target.prefill_end:
                paired.read_to(end, marks=True)  # where the model may go back to
            else:
                paired.read_to(len(paired.text) - 1)

    def draft(self, most: int) -> list[int]:
        self._pause = max(0, self._pause - 1)
        if most < 1 or not self._may_draft():
            return []
        return self._draft_from(self._paired.n_unread, most, self._read)

    def _read(self, _: int) -> NDArray[np.float32] | None:
        begun_at, n_unread = time.perf_counter(), self._paired.n_unread
        logits = self._paired.read()
        if logits is None:
            return None
        self._steps.measure_read(n_unread, time.perf_counter() - begun_at)
        return self._padded(logits)

    def _step(self, token: int) -> NDArray[np.float32]:
        return self._padded(self._paired.step(token))

    def _padded(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._guessed is None:
            self._logits[: len(logits)] = logits
        else:
            self._logits[self._guessed] = logits
        return self._logits

    def _forget(self) -> None:
        self._paired.forget()
        self._guesses = []

    def _give_up(self) -> None:
        """What the grammar allows may be beyond the tokens that are guessed: so no draft."""


class BlockDrafter(OwnDrafter):
    """Drafts what such layers guess of a block of tokens at once, ``block_size`` with the latest.

    ``mask_token`` stands where the others will be; the guesses know nothing of what the others are.
    """

    def __init__(
        self, paired: PairedText, *arguments: Any, block_size: int, mask_token: int, **options: Any
    ) -> None:
        super().__init__(paired, *arguments, **options)
        self._most, self._mask = block_size - 1, mask_token
        self._ahead: list[NDArray[np.float32]] = []  # logits of the next tokens, last first

    def draft(self, most: int) -> list[int]:
        return super().draft(min(most, self._most))

    def _read(self, n_guesses: int) -> NDArray[np.float32] | None:
        begun_at = time.perf_counter()
        rows = cast("CachedText", self._paired).guess(n_guesses, self._mask)
        if rows is None:
            return None
        seconds = time.perf_counter() - begun_at
        for _ in range(n_guesses):
            self._steps.measure_step(seconds / n_guesses)
        self._ahead = list(rows[::-1])
        return self._padded(self._ahead.pop())

    def _step(self, token: int) -> NDArray[np.float32]:
        return self._padded(self._ahead.pop())

    def _measure_step(self, seconds: float) -> None:
        """It was measured for the block."""
