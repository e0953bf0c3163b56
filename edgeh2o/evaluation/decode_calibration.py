"""Measures what generated tokens lose that read by a table's budgets: its ``DecodeQuality``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention.budget_points import budget_of_length
from ..attention.decode_quality import DecodeQuality, kl_limit
from ..attention.head_budgets import grow_budgets, grow_decode_budgets, known_points
from ..attention.headwise import HeadwiseConfig
from ..attention.headwise_settings import DECODE_FROM
from ..errors import ResourceError, UsageError
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, beginning_with, count_windows, window_length
from .decoding import compare_decodes
from .progress import Progress, Steps

if TYPE_CHECKING:
    from ..attention.budget_table import Budget, BudgetTable
    from ..llm import LLM
    from .long_texts import Window

DECODED = 256
LEAST_LENGTH = DECODE_FROM + DECODED
# Keys of generated tokens that are tried. They need not be those of prompts: with 512 of query
# heads prompts of SmolLM2-135M lose nothing, and decode by 512 of KV heads has a KL of 14e-3.
_BUDGETS = (1024, 1280, 1536)
# More of them, after prompts of twice the length only.
_LONG_BUDGETS = (1792, 2048)
# Of the rows of a prompt, what generated tokens may read of it: with more, little is gained.
_WORTHWHILE = 3 / 4
# A window takes about as long as so many of the other steps of a calibration, one of twice the
# length about twice as long.
_WINDOW_STEPS, _LONG_STEPS = 2, 4
# Of the prompt, what the one head keeps that shows how far rounding carries a small difference.
_KEPT_SHARE = 7 / 8


def require_decodable(length: int) -> None:
    """Raises UsageError for windows whose prompt would be read whole, as a short one is."""
    if length < LEAST_LENGTH:
        raise UsageError(
            f"to measure decode, windows need at least {LEAST_LENGTH} tokens, got {length}; use a "
            "larger --length, or leave out --decode"
        )


def count_decode_steps(windows: Windows, long: Windows) -> int:
    """Steps of ``find_decode``, each about as long as a read of a window."""
    n_long = len(_BUDGETS + _LONG_BUDGETS) * _LONG_STEPS * count_windows(long)
    return len(_BUDGETS) * _WINDOW_STEPS * count_windows(windows) + n_long


def find_decode(
    llm: LLM,
    table: BudgetTable,
    base: int,
    windows: Windows,
    long: Windows,
    progress: Progress,
    notes: CalibrationNotes,
) -> DecodeQuality:
    """The quality of the least budget that is harmless, or of the largest that was tried.

    At least ``base``, that of prompts. ``long`` has windows of twice the length, or none: where as
    many keys or more are harmless after those too, the quality is that of both lengths, else of the
    shorter one. ``progress`` makes ``count_decode_steps``. Raises ResourceError when two sessions
    of the shorter length do not fit in memory.
    """
    steps = Steps(progress, count_decode_steps(windows, long), size=llm.config.n_layers)
    meter = DecodeMeter(llm, table, base, windows, steps, notes)
    quality = _find_least(meter, sorted({max(base, least) for least in _BUDGETS}))
    if quality.is_harmless and long:
        quality = _find_longer(llm, table, base, quality, long, steps, notes)
    steps.finish()
    return quality


def _find_longer(
    llm: LLM,
    table: BudgetTable,
    base: int,
    short: DecodeQuality,
    long: Windows,
    steps: Steps,
    notes: CalibrationNotes,
) -> DecodeQuality:
    """The quality of both lengths; that of the ``short`` one where no budget serves both."""
    length = window_length(long)
    try:
        meter = DecodeMeter(llm, table, base, long, steps, notes)
        tried = [
            budget
            for budget in sorted({short.budget, *_BUDGETS, *_LONG_BUDGETS})
            if budget >= short.budget and meter.count_rows(budget) <= _WORTHWHILE * length
        ]
        if not tried:
            return short
        quality = _find_least(meter, tried)
    except ResourceError:
        return short
    if not quality.is_harmless:
        return short
    kl = {kind: max(value, quality.kl.get(kind, 0.0)) for kind, value in short.kl.items()}
    return replace(quality, kl={**quality.kl, **kl})


def _find_least(meter: DecodeMeter, tried: Sequence[int]) -> DecodeQuality:
    """The quality of the first that is harmless, or of the last."""
    for budget in tried:
        quality = meter.measure(budget)
        if quality.is_harmless:
            break
    return quality


class DecodeMeter:
    """Compares decode by budgets of a table with dense decode, in windows of one length by kind.

    The last 256 tokens of every window, whose length is ``require_decodable``, are decoded as they
    stand, after the same sparse prefill. Budgets are those of a default run where prompts of the
    table's length have ``base`` keys: what they grow to. Where weights are quantised, activations
    are rounded to 8 bits before every product, and a difference in the last bit of one head sends
    what follows another way: of a divergence above the limit is taken off what comes of a rule by
    which one head of the first layer leaves out an eighth, and all others nothing.
    """

    def __init__(
        self,
        llm: LLM,
        table: BudgetTable,
        base: int,
        windows: Windows,
        steps: Steps,
        notes: CalibrationNotes,
    ) -> None:
        self._llm = llm
        self._table = table
        self._base = base
        self._windows = windows
        self._steps, self._notes = steps, notes
        self._length = window_length(windows)
        self._window_steps = _LONG_STEPS if self._length > table.length else _WINDOW_STEPS
        self._grown = budget_of_length(known_points(table, base), self._length)
        self._prefill = HeadwiseConfig(
            budgets=grow_budgets(table, base, self._grown),
            by_query_head=table.n_heads > 0,
            decode_attention="dense",
        )
        least: list[Budget] = [None] * (table.n_layers * table.n_kv_heads)
        n_prompt = self._length - DECODED
        least[0] = max(1, round(_KEPT_SHARE * n_prompt) - self._prefill.local)
        self._least = self._reading(least)

    def count_rows(self, budget: int) -> float:
        """Rows of a prompt as long as the windows that a KV head reads in the mean."""
        rows = self._by(budget).decode_rows(self._length)
        return float(np.mean(rows)) if rows else self._length

    def measure(self, budget: int) -> DecodeQuality:
        """What a mean ``budget`` of KV heads loses.

        Kinds that come after one that loses too much are not read, and the next budget begins with
        that one. Raises ResourceError when two sessions do not fit in memory.
        """
        by_budgets = self._by(budget)
        kl: dict[str, float] = {}
        quality = DecodeQuality(budget=budget, length=self._length, kl=kl)
        for kind in self._windows:

            def measure(kind: str = kind) -> float:
                return self._measure_kind(by_budgets, kind)

            name = f"decode, {self._length} tokens, {budget} keys from {self._base}: {kind}"
            kl[kind] = self._notes.recall(name, measure)
            if not quality.is_harmless:
                self._windows = beginning_with(kind, self._windows)
                break
        return quality

    def _by(self, budget: int) -> HeadwiseConfig:
        return self._reading(
            grow_decode_budgets(self._table, self._base, self._grown, least=budget)
        )

    def _reading(self, decode_budgets: Sequence[Budget]) -> HeadwiseConfig:
        return replace(
            self._prefill, decode_attention="headwise", decode_budgets=tuple(decode_budgets)
        )

    def _measure_kind(self, by_budgets: HeadwiseConfig, kind: str) -> float:
        """Mean KL of a kind of text, in nats."""
        texts = self._windows[kind]
        kl = self._compare(by_budgets, texts)
        if kl > kl_limit(kind):
            kl = max(0.0, kl - self._compare(self._least, texts))
        self._steps.advance(self._window_steps * len(texts))
        return round(kl, 6)

    def _compare(self, rule: HeadwiseConfig, texts: Sequence[Window]) -> float:
        runners = [
            self._llm.start_runner(self._length, attention=each) for each in (self._prefill, rule)
        ]
        divergences = []
        for window in texts:
            (scores,) = compare_decodes(
                runners, window, DECODED, on_tokens=lambda _: None, shares_prompt=True
            )
            divergences.append(float(scores.kl.mean()))
        return float(np.mean(divergences))
