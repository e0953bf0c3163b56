"""What a layer that guesses tokens ahead (MTP, EAGLE-3) has read of a text, and what it is to read.

It reads pairs: a token, and what the model's logits at the token before were made of, its hidden
row. The model gives those of every call. Where rows are missing (of a session file, of tokens that
were cached, behind a jump) it begins again from what there is: its guesses may be worse then, the
text is the model's in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..runners.base import RunnerState
from .transcript import count_common

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import HiddenRunner


class PairedText:
    """A text, hidden rows of its tokens, and the sequence of the layer.

    ``text`` grows by whoever has this; ``dim`` is the width of a row. The sequence counts positions
    from token ``_base`` of the text on: rotary embeddings look at distances alone. A layer that
    ``encodes_rows`` makes rows of other rows of the model, and reads no token without one.
    """

    def __init__(self, runner: HiddenRunner, dim: int, *, encodes_rows: bool = False) -> None:
        self._runner = runner
        self._dim = dim
        self._encodes_rows = encodes_rows
        self._start = int(encodes_rows)  # the first token that is read
        self.text: list[int] = []
        self._base = self._end = self._start  # tokens of the text that the sequence has read
        self._first = 0  # token of the first row below
        self._rows: list[NDArray[np.float32]] = []  # [n][dim] each
        self._latest = np.zeros((1, dim), np.float32)  # of the layer's own latest token

    @property
    def n_unread(self) -> int:
        """Tokens to be read before the next guess."""
        return max(1, len(self.text) - self._end)

    @property
    def n_pending(self) -> int:
        """Rows that wait to be read."""
        return sum(map(len, self._rows))

    def move_to(self, runner: HiddenRunner) -> None:
        """Goes on in a larger sequence."""
        is_copied = RunnerState.copy(self._runner, runner)
        self._runner = runner
        if not is_copied:
            self._restart(self._start)

    def begin(self, text: list[int]) -> None:
        """The text is another one: what both begin with is kept."""
        n_common = count_common(self.text, text)
        self._end = max(self._start, min(self._end, n_common))
        self._cut_rows(n_common)
        self.text = text

    def take_rows(self, first: int, rows: NDArray[np.float32]) -> None:
        """The model's hidden rows [n][dim] of the tokens from ``first`` on.

        Rows that were there from that token on were of drafts that the text has not.
        """
        if self._encodes_rows:
            rows = self._runner.encode(rows)
        if self._first <= first <= self._first + self.n_pending:
            self._cut_rows(first)
            self._rows.append(rows)
        else:
            self._first, self._rows = first, [rows]

    def read_to(self, end: int, *, marks: bool = False) -> None:
        """Reads the tokens before ``end``, no logits; ``marks`` where it then is."""
        begin = self._find_begin(end) if end > self._end else None
        if begin is None:
            return
        runner = self._runner
        runner.keeps_hidden = False
        while begin < end:
            stop = min(end, begin + runner.batch_size)
            tokens = np.array(self.text[begin:stop], np.int32)
            runner.prefill(tokens, is_last=False, hidden=self._before(begin, stop))
            begin = self._end = stop
        if marks:
            runner.mark()
        self._drop_read()

    def read(self) -> NDArray[np.float32] | None:
        """Reads the rest of the text; the logits behind it, None where rows are missing."""
        runner, end = self._runner, len(self.text)
        if end - self._end > runner.max_decode_tokens:
            self.read_to(end - 1)
        begin = self._find_begin(end)
        if begin is None or end - begin > runner.max_decode_tokens:
            return None
        runner.keeps_hidden = True
        tokens = np.array(self.text[begin:end], np.int32)
        logits: NDArray[np.float32] = runner.decode_batch(tokens, self._before(begin, end))[-1]
        runner.accept(len(tokens) - 1)
        self._end = end
        self._take_latest()
        self._drop_read()
        return logits

    def step(self, token: int) -> NDArray[np.float32]:
        """Logits behind a token that was drafted; it is taken back by what follows ``read``."""
        logits = self._runner.decode(token, self._latest)
        self._take_latest()
        return logits

    def forget(self) -> None:
        """Nothing is read: a call may have been interrupted."""
        self._restart(self._start)

    def _take_latest(self) -> None:
        rows = self._runner.hidden
        if rows is None:
            raise RuntimeError("the sequence keeps no hidden rows")
        self._latest = rows[-1:]

    def _cut_rows(self, end: int) -> None:
        """Forgets the rows of the tokens from ``end`` on."""
        left = max(0, end - self._first)
        kept = []
        for rows in self._rows:
            if left > 0:
                kept.append(rows[:left])
            left -= len(rows)
        self._rows = kept

    def _drop_read(self) -> None:
        """Forgets rows that were read, but for the last: it goes with the next token."""
        n_read = self._end - 1 - self._first
        while self._rows and n_read >= len(self._rows[0]):
            n_read -= len(self._rows[0])
            self._first += len(self._rows.pop(0))
        if self._rows and n_read > 0:
            # A copy, that the rows of a long call do not stay for the sake of one.
            self._rows[0] = self._rows[0][n_read:].copy()
            self._first += n_read

    def _restart(self, begin: int) -> None:
        self._runner.reset()
        self._base = self._end = begin

    def _find_begin(self, end: int) -> int | None:
        """Where reading to ``end`` begins, with the sequence taken there; None without the rows.

        The last token is read in any case. A single row that is missing is taken as zeros.
        """
        begin = min(self._end, end - 1)
        if begin < self._start or (end > 1 and self._first + self.n_pending < end - 1):
            return None
        if begin < self._first + self._start:
            begin = self._first + max(self._start, self._first > 0)
            if begin >= end:
                return None
            self._restart(begin)
            return begin
        if not self._can_go_on(begin):
            self._restart(begin)
        self._end = begin
        return begin

    def _can_go_on(self, begin: int) -> bool:
        """Whether the sequence goes on from that token: then it is taken there."""
        held = begin - self._base
        if held < 0 or self._runner.find_mark(held) != held:
            return False
        if self._runner.position != held:
            self._runner.rewind(held)
        return True

    def _before(self, begin: int, end: int) -> NDArray[np.float32]:
        """What stands beside tokens [begin, end): the rows of those before each, [n][dim]."""
        n_missing = int(begin - 1 < self._first)
        zeros = np.zeros((n_missing, self._dim), np.float32)
        return np.concatenate([zeros, self._find_rows(begin - 1 + n_missing, end - 1)])

    def _find_rows(self, begin: int, end: int) -> NDArray[np.float32]:
        """Rows [n][dim] of tokens [begin, end), which wait to be read."""
        first, n = begin - self._first, end - begin
        parts = [np.zeros((0, self._dim), np.float32)]
        for rows in self._rows:
            if n > 0 and first < len(rows):
                parts.append(rows[first : first + n])
                n -= len(parts[-1])
            first = max(0, first - len(rows))
        return np.concatenate(parts)


class CachedText(PairedText):
    """A text of which keys and values are made, of the row of every token but the latest.

    That one begins a block of tokens, which see each other and all before. The block leaves nothing
    behind.
    """

    def __init__(self, runner: HiddenRunner, dim: int) -> None:
        super().__init__(runner, dim, encodes_rows=True)
        self._start = self._base = self._end = 0

    @property
    def n_unread(self) -> int:
        return max(1, len(self.text) - 1 - self._end)

    def guess(self, n: int, mask: int) -> NDArray[np.float32] | None:
        """Logits [n, n_guessed] of the n tokens behind the latest; None where rows are missing."""
        runner, end = self._runner, len(self.text) - 1
        self.read_to(end)
        if self._end != end or end == 0:
            return None
        if not self._can_go_on(end):
            self._restart(end)
        held = runner.position
        if held == 0:
            return None
        block = np.array([self.text[-1], *[mask] * n], np.int32)
        logits: NDArray[np.float32] = runner.decode_batch(block)[1:]
        runner.rewind(held)
        return logits

    def _find_begin(self, end: int) -> int | None:
        begin = max(self._end, self._first)
        if begin >= end or self._first + self.n_pending < end:
            return None
        if begin > self._end or not self._can_go_on(begin):
            begin = self._first
            self._restart(begin)
        self._end = begin
        return begin

    def _before(self, begin: int, end: int) -> NDArray[np.float32]:
        """The rows of the tokens themselves."""
        return self._find_rows(begin, end)
