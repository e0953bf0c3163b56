"""Drafts of layers that attend to what the model has cached (the assistants of Gemma 4).

They keep nothing of a text: a guess is made of the latest token, of what the model's logits of it
were made of, and of the model's keys and values. The guess after it has the row that the one
before gives, and the same position: nothing is written that would have to be taken back.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..runners.base import HiddenRows
from ..sampling_config import DRAFT_OFF, SamplingParams
from .draft_file import DraftFile
from .writing_drafter import WritingDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .. import _core
    from ..runners.base import HiddenRunner, Runner
    from ..runners.drafting_layer import LentLayersFile
    from ..runners.native import NativeModel
    from .drafting import CallCosts, Drafter
    from .models import LoadedModel
    from .plan import RunPlan

STEP_COST = 0.1  # of a drafted token in calls of the model, before it is measured


def cache_draft_file(file: LentLayersFile, plan: RunPlan) -> DraftFile:
    """Such layers of a file that is open, whose model runs by ``plan``."""

    def load(model: LoadedModel) -> CacheDraft:
        reader = cast("NativeModel", model).load_lent_layers(file, plan.threads)
        return CacheDraft(reader, file, plan)

    return DraftFile(file, partial(file.estimate_context_bytes, threads=plan.threads), load)


class CacheDraft:
    """The loaded layers: a ``DraftProvider`` and its source, for any number of answers at once."""

    hidden_rows = HiddenRows(is_last_only=True)

    def __init__(self, reader: _core.LentReader, file: LentLayersFile, plan: RunPlan) -> None:
        self._reader = reader
        self._name, self._vocab_size = file.name, file.config.vocab_size
        self._weight_bytes = file.n_weight_bytes
        self._estimate = partial(file.estimate_context_bytes, threads=plan.threads)
        self._call: Callable[[Callable[[], Any]], Any] = lambda work: work()
        self._may_draft: Callable[[], bool] = lambda: True
        self._context = 0

    def share(
        self, call: Callable[[Callable[[], Any]], Any], may_draft: Callable[[], bool]
    ) -> None:
        """Before the first draft: its work is done by ``call``.

        ``may_draft`` says whether there is time for a draft now.
        """
        self._call, self._may_draft = call, may_draft

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What it has allocated, by purpose."""
        session = self._estimate(self._context) if self._context else 0
        return {"draft_weights": self._weight_bytes, "draft_session": session}

    def prepared(self, sampling: SamplingParams, context: int) -> CacheDraft | None:
        """See ``DraftProvider``."""
        if sampling.draft_tokens == DRAFT_OFF:
            return None
        self._context = max(self._context, context)
        return self

    def make_drafter(
        self, runner: Runner, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
    ) -> Drafter:
        """A ``CacheDrafter``; see ``DraftSource``."""
        return CacheDrafter(
            self.guess,
            cast("HiddenRunner", runner),
            self._vocab_size,
            costs,
            length,
            self._may_draft,
            name=self._name,
        )

    def guess(
        self, target: Runner, token: int, hidden: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits behind ``token`` [vocab_size], which ``target`` has not read, and the next row.

        ``hidden`` [1, width] is the row of the token before.
        """
        # What the runner of a server runs.
        sequence = cast("_core.Sequence", getattr(target, "runner", target))
        result: tuple[NDArray[np.float32], NDArray[np.float32]] = self._call(
            lambda: self._reader.guess(sequence, token, hidden)
        )
        return result


class CacheDrafter(WritingDrafter):
    """Drafts what such layers would draw after the text, from the same random numbers.

    ``guess`` is that of ``CacheDraft``, ``target`` the model's runner, which keeps hidden rows.
    """

    def __init__(
        self,
        guess: Callable[..., tuple[NDArray[np.float32], NDArray[np.float32]]],
        target: HiddenRunner,
        vocab_size: int,
        costs: CallCosts,
        length: int | None,
        may_draft: Callable[[], bool] = lambda: True,
        *,
        name: str,
    ) -> None:
        super().__init__(name, vocab_size, costs, length, STEP_COST)
        self._guess, self._target, self._may_draft = guess, target, may_draft
        self._token: int | None = None  # the latest, which the model has not read
        self._first = 0  # token of the first row below
        self._rows: NDArray[np.float32] | None = None  # [n, width] of the latest call
        self._next: NDArray[np.float32] | None = None  # [1, width] of the latest guess

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        self._guesses, self._pause = [], 0
        self._token = None
        self._take_rows(len(tokens))

    def push(self, token: int) -> None:
        self._token = token
        self._learn(token)

    def note_rows(self, first: int) -> None:
        rows, position = self._target.hidden, self._target.position
        # Behind a call of several tokens those ahead have rows too; of a prompt the last has one.
        n_rows = 0 if rows is None else len(rows)
        self._take_rows(first + n_rows if position <= first + n_rows else position)

    def _take_rows(self, end: int) -> None:
        """The rows of the latest call, whose last token is the one before ``end``."""
        self._rows = self._target.hidden
        self._first = end - (0 if self._rows is None else len(self._rows))

    def draft(self, most: int) -> list[int]:
        self._pause = max(0, self._pause - 1)
        token, index = self._token, self._target.position - 1 - self._first
        if token is None or self._rows is None or not 0 <= index < len(self._rows):
            return []
        if most < 1 or not self._may_draft():
            return []
        self._next = self._rows[index : index + 1]
        return self._draft_from(1, most, partial(self._read, token))

    def _read(self, token: int, _: int) -> NDArray[np.float32]:
        begun_at = time.perf_counter()
        logits = self._step(token)
        self._steps.measure_read(1, time.perf_counter() - begun_at)
        return logits

    def _step(self, token: int) -> NDArray[np.float32]:
        logits, self._next = self._guess(self._target, token, self._next)
        return logits

    def _forget(self) -> None:
        self._guesses, self._rows = [], None

    def _give_up(self) -> None:
        """What the grammar allows may be what is never guessed: so no draft."""
