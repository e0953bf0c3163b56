"""Drafts of a smaller model: it writes ahead what the model then checks.

It keeps a sequence of its own, which follows the text token by token: what it has written ahead and
the text does not have is taken back, what the text has and it has not is read. So nothing that
happens to the model's sequence (a new turn, a session file, a shift of the context) concerns it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ..runners.runner_calls import mark_where_due, plan_calls
from .drafting import CallCosts
from .transcript import count_common
from .writing_drafter import WritingDrafter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner
    from .draft_sources import ModelSource


class ModelDrafter(WritingDrafter):
    """Drafts what a smaller model would draw after the text, from the same random numbers.

    ``prompt`` [n] are the tokens in the model's cache; ``length`` drafts so many always, None as
    many as pay. The text is read when the first draft is wanted, and of a text that is longer than
    the draft model's context nothing more is drafted.
    """

    def __init__(
        self,
        model: ModelSource,
        prompt: NDArray[np.int32],
        costs: CallCosts,
        length: int | None,
        step_cost: float = 0.3,
    ) -> None:
        super().__init__(str(model.path), model.vocab_size, costs, length, step_cost)
        self._model = model
        self._last_runner: BatchRunner | None = None  # that was lent
        self._can_read = True  # all tokens are of the vocabulary
        self.begin_again(prompt)

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        self._text: list[int] = tokens.tolist()
        self._n_held: int | None = None  # tokens of the text that the sequence holds
        self._ahead: list[int] = []  # and the drafted ones that it holds behind them
        self._guesses = []
        # For good, as the repeat penalty may look at tokens that have left the text.
        self._can_read = self._can_read and max(self._text, default=0) < self._vocab_size
        self._pause = 0

    def push(self, token: int) -> None:
        self._text.append(token)
        self._can_read = self._can_read and token < self._vocab_size
        if self._ahead and self._ahead[0] == token and self._n_held is not None:
            self._ahead.pop(0)
            self._n_held += 1
        else:
            self._ahead = []
        self._learn(token)

    def note_rows(self, first: int) -> None:
        """It reads tokens alone."""

    def draft(self, most: int) -> list[int]:
        most = min(most, self._model.max_context - len(self._text))
        self._pause = max(0, self._pause - 1)
        if not self._can_read or most < 1:
            return []
        with self._model.lend() as runner:
            if runner is None or (most := min(most, runner.max_context - len(self._text))) < 1:
                return []  # others may have made it anew, for shorter texts
            if runner is not self._last_runner:  # what it holds is not known
                self._last_runner, self._n_held, self._ahead = runner, None, []
            return self._draft(most)

    @property
    def _runner(self) -> BatchRunner:
        """The one that is lent."""
        if self._last_runner is None:
            raise RuntimeError("there is a runner only while one is lent")
        return self._last_runner

    def _draft(self, most: int) -> list[int]:
        is_first = self._n_held is None
        n_unread = len(self._text) - self._count_held()

        def read(_: int) -> NDArray[np.float32]:
            begun_at = time.perf_counter()
            logits = self._read()
            if not is_first:
                self._steps.measure_read(n_unread, time.perf_counter() - begun_at)
            return logits

        return self._draft_from(1 if is_first else n_unread, most, read)

    def _count_held(self) -> int:
        """Tokens of the text in the sequence that are not to be read again."""
        if self._n_held is None:
            self._n_held = count_common(self._runner.token_ids, self._text)
        # The logits after the last one are needed.
        return min(self._n_held, len(self._text) - 1)

    def _forget(self) -> None:
        self._runner.reset()
        self._n_held, self._ahead, self._guesses = 0, [], []

    def _read(self) -> NDArray[np.float32]:
        """Reads what is new of the text; the logits after its last token."""
        runner, n_held, end = self._runner, self._count_held(), len(self._text)
        if runner.position != n_held:
            n_held = runner.find_mark(n_held)
            runner.rewind(n_held)
        tokens = np.array(self._text[n_held:], np.int32)
        logits: NDArray[np.float32] | None = None
        if len(tokens) <= runner.max_decode_tokens:
            logits = runner.decode_batch(tokens)[-1]
            runner.accept(len(tokens) - 1)
        else:
            for call in plan_calls(n_held, end, runner):
                mark_where_due(runner)
                part = tokens[call.start - n_held : call.stop - n_held]
                logits = runner.prefill(part, is_last=call.stop == end, stays_open=True)
            mark_where_due(runner)
        if logits is None:
            raise ValueError("the draft model returned no logits")
        self._n_held, self._ahead, self._guesses = end, [], []
        return logits

    def _step(self, token: int) -> NDArray[np.float32]:
        logits = self._runner.decode(token)
        self._ahead.append(token)
        return logits

    def _give_up(self) -> None:
        self._can_read = False
