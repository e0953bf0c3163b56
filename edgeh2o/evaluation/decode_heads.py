"""Finds the KV heads that spoil a decode by few keys, which then read everything."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..attention.decode_quality import DecodeQuality, kl_limit
from ..attention.headwise import HeadwiseConfig
from ..engine.calibration import read_densely
from ..engine.decode_probe import DecodeProbe
from ..errors import ResourceError
from ..runners.base import Runner, RunnerState
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, count_windows, window_length
from .comparison import TokenScores, compare_logits, join_scores
from .decode_meter import DECODED, LONG_STEPS, WINDOW_STEPS, DecodeMeter
from .decoding import decode_together
from .progress import Steps
from .reading import prefill_prompt
from .text_calibration import start_reader

if TYPE_CHECKING:
    from ..attention.budget_table import Budget, BudgetTable
    from ..llm import LLM
    from .long_texts import Window

# Keys of the heads that have a limit, and of a longer prompt as large a part as of 8,192 tokens.
_KEYS, _KEYS_SHARE = 2048, 1 / 4
# Of the KL limit of the kind of text that shows which heads need everything, what the others may
# lose of it: less where other windows lose too much then.
_SHARES = (1 / 2, 1 / 4)
# The read that shows the heads' errors, the one of the prompt that all numbers of heads share, and
# the tokens after it, in windows of the length that this is done at.
_SEARCH_WINDOWS = 2


def count_head_steps(windows: Windows, long: Windows) -> int:
    """Steps of ``find_heads``, as those of ``count_decode_steps``."""
    n_own = WINDOW_STEPS * count_windows(windows)
    if not long:
        return _SEARCH_WINDOWS * WINDOW_STEPS + len(_SHARES) * n_own
    n_long = LONG_STEPS * count_windows(long)
    return _SEARCH_WINDOWS * LONG_STEPS + len(_SHARES) * (n_long + n_own)


class WindowDecoder:
    """Decodes the end of a window by any budgets of KV heads, after one read of its beginning.

    The last ``n_decoded`` tokens of ``window`` [n] are decoded as they stand, and compared with
    dense decode; ``rule`` says how the others are read. A head without a budget reads cached rows,
    which runs keep in 8 bits where the cache has f16. Raises ResourceError when two sessions do not
    fit in memory.
    """

    def __init__(self, llm: LLM, rule: HeadwiseConfig, window: Window, n_decoded: int) -> None:
        self._llm = llm
        self._rule = rule
        self._length = len(window)
        self._prompt, self._rest = np.split(window, [self._length - n_decoded])
        # Every head notes what it would choose by, and what reads everything has room for all.
        self._read = self._start((None,) * llm.config.n_slots)
        prefill_prompt(self._read, self._prompt)
        self._dense = list(self._decode(self._start(None)))

    def compare(self, budgets: Sequence[Budget]) -> TokenScores:
        """Scores of the last ``n_decoded`` - 1 tokens by the budgets of every layer's KV heads."""
        blocks = self._decode(self._start(budgets))
        return join_scores(
            [
                compare_logits(own, other, self._rest[first + 1 : first + 1 + len(own)])
                for (first, own), (_, other) in zip(self._dense, blocks, strict=True)
            ]
        )

    def _start(self, budgets: Sequence[Budget] | None) -> Runner:
        rule = self._rule.decoding_densely()
        if budgets is not None:
            limits = tuple(self._length if budget is None else budget for budget in budgets)
            rule = replace(rule, decode_attention="headwise", decode_budgets=limits)
        return self._llm.start_runner(self._length, n_prompt=len(self._prompt), attention=rule)

    def _decode(self, runner: Runner) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Index and logits of blocks of the rest."""
        if not RunnerState.copy(self._read, runner):
            prefill_prompt(runner, self._prompt)
        for first, (logits,) in decode_together([runner], self._rest[:-1]):
            yield first, logits.copy()  # a runner may write the next ones there


def find_heads(
    llm: LLM,
    table: BudgetTable,
    base: int,
    windows: Windows,
    long: Windows,
    steps: Steps,
    notes: CalibrationNotes,
    *,
    kind: str | None,
    most_rows: float,
) -> DecodeQuality | None:
    """The quality of decode where the heads that need it read everything and others few keys.

    The errors of heads, in a window of the ``kind`` of text that lost too much by budgets (None:
    the first) and of the largest length, say which of them are the first to read everything; how
    many do is found by what decode loses on that window. None where more than the mean
    ``most_rows`` of a prompt so long would be read, some kind of text loses too much, or memory
    does not suffice.
    """
    longest = long or windows
    keys = max(_KEYS, round(_KEYS_SHARE * window_length(longest)))
    kind = kind or next(iter(longest))
    try:
        meter = DecodeMeter(llm, table, base, longest, steps, notes)
        advance = partial(steps.advance, LONG_STEPS if long else WINDOW_STEPS)
        tried = _Search(llm, meter, longest[kind][0], kind, keys, notes, advance).run(most_rows)
        for heads in tried:
            quality = meter.measure_heads(heads, keys)
            if quality.is_harmless and long:
                shorter = DecodeMeter(llm, table, base, windows, steps, notes)
                quality = quality.joined(shorter.measure_heads(heads, keys))
            if quality.is_harmless:
                return quality
    except ResourceError:
        pass  # decode is as it would be without this
    return None


class _Search:
    """How many heads have to read everything, of those that err most with so many ``keys``."""

    def __init__(
        self,
        llm: LLM,
        meter: DecodeMeter,
        window: Window,
        kind: str,
        keys: int,
        notes: CalibrationNotes,
        advance: Callable[[], None],
    ) -> None:
        """``advance`` counts a window of ``_SEARCH_WINDOWS`` that was read."""
        self._llm = llm
        self._advance = advance
        self._meter = meter
        self._window = window
        self._kind = kind
        self._keys = keys
        self._notes = notes
        self._name = f"decode, {len(window)} tokens of {kind}, {keys} keys"

    def run(self, most_rows: float) -> list[tuple[Budget, ...]]:
        """Budgets of all heads by which less and less is lost; none where that takes more rows."""
        most = self._count_worthwhile(most_rows)
        numbers = [self._find_fewest(share * kl_limit(self._kind), most) for share in _SHARES]
        return [self._budgets(n) for n in sorted({n for n in numbers if n is not None})]

    def _budgets(self, n_full: int) -> tuple[Budget, ...]:
        """Where the first ``n_full`` read everything."""
        full = set(self._order[:n_full])
        return tuple(None if head in full else self._keys for head in range(len(self._order)))

    def _count_worthwhile(self, most_rows: float) -> int:
        """How many heads may read everything, where so many rows are read in the mean; -1: none."""
        numbers = range(len(self._order))  # one head at least has a limit

        def is_more(n_full: int) -> bool:
            rule = self._meter.reading(self._budgets(n_full))
            return self._meter.rows_of(rule) > most_rows

        return bisect_left(numbers, True, key=is_more) - 1

    def _find_fewest(self, most_lost: float, most: int) -> int | None:
        """With how many, up to ``most``, the window has no larger KL, in nats; None if with none.

        Less what rounding does.
        """

        def is_enough(n_full: int) -> bool:
            return self._lost(n_full) - self._rounding <= most_lost

        if most < 0 or not is_enough(most):
            return None
        return bisect_left(range(most), True, key=is_enough)

    @cached_property
    def _order(self) -> list[int]:
        """The heads, by falling error."""
        errors = self._notes.recall(f"{self._name}: errors", self._measure_errors)
        return sorted(range(len(errors)), key=lambda head: (-errors[head], head))

    def _measure_errors(self) -> list[float]:
        length, model = len(self._window), self._llm.model
        probe = DecodeProbe(
            cast("Any", model),  # what shows its attention
            length,
            length - DECODED,
            self._keys,
            threads=self._llm.threads,
            rule=self._meter.prefill,
        )
        runner = start_reader(self._llm, length)
        if runner.batch_size >= length:
            cast("Any", runner).prefill(self._window, is_last=True, on_attention=probe)
        else:
            read_densely(model, self._window, self._llm.threads, probe)
        self._advance()
        errors: list[float] = probe.errors.tolist()
        return errors

    @cached_property
    def _decoder(self) -> WindowDecoder:
        decoder = WindowDecoder(self._llm, self._meter.prefill, self._window, DECODED)
        self._advance()
        return decoder

    def _lost(self, n_full: int) -> float:
        name = f"{self._name}: all but {n_full} heads"
        return self._measure(name, self._budgets(n_full))

    @cached_property
    def _rounding(self) -> float:
        return self._measure(f"{self._name}: rounding", self._meter.least.decode_budgets or ())

    def _measure(self, name: str, budgets: Sequence[Budget]) -> float:
        """Mean KL, in nats."""

        def measure() -> float:
            return float(self._decoder.compare(budgets).kl.mean())

        kl: float = self._notes.recall(name, measure)
        return kl
