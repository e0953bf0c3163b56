"""What generated tokens lose by budgets of KV heads, in windows of every kind of text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention.budget_points import budget_of_length
from ..attention.decode_quality import DecodeQuality, kl_limit
from ..attention.head_budgets import grow_budgets, grow_decode_budgets, known_points
from ..attention.headwise import HeadwiseConfig
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, beginning_with, window_length
from .decoding import compare_decodes
from .progress import Steps

if TYPE_CHECKING:
    from ..attention.budget_table import Budget, BudgetTable
    from ..llm import LLM
    from .long_texts import Window

DECODED = 256
# A window takes about as long as so many of the other steps of a calibration, one of twice the
# length about twice as long.
WINDOW_STEPS, LONG_STEPS = 2, 4
# Of the prompt, what the one head keeps that shows how far rounding carries a small difference.
_KEPT_SHARE = 7 / 8


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
        self.length = window_length(windows)
        self._window_steps = LONG_STEPS if self.length > table.length else WINDOW_STEPS
        self._grown = budget_of_length(known_points(table, base), self.length)
        self.prefill = HeadwiseConfig(
            budgets=grow_budgets(table, base, self._grown),
            by_query_head=table.n_heads > 0,
            decode_attention="dense",
        )
        least: list[Budget] = [None] * (table.n_layers * table.n_kv_heads)
        least[0] = max(1, round(_KEPT_SHARE * self.n_prompt) - self.prefill.local)
        self.least = self.reading(least)

    @property
    def n_prompt(self) -> int:
        """Tokens of a window before those that are decoded."""
        return self.length - DECODED

    def count_rows(self, budget: int) -> float:
        """Rows of a window's prompt that a KV head reads in the mean."""
        return self.rows_of(self._by(budget))

    def rows_of(self, rule: HeadwiseConfig) -> float:
        """Those that it reads by a rule."""
        rows = rule.decode_rows(self.n_prompt)
        return float(np.mean(rows)) if rows else self.n_prompt

    def measure(self, budget: int) -> DecodeQuality:
        """What a mean ``budget`` of KV heads loses.

        Kinds that come after one that loses too much are not read, and the next budget begins with
        that one. Raises ResourceError when two sessions do not fit in memory.
        """
        name = f"decode, {self.length} tokens, {budget} keys from {self._base}"
        kl: dict[str, float] = {}
        quality = DecodeQuality(budget=budget, length=self.length, kl=kl)
        self._measure_kinds(self._by(budget), quality, kl, name)
        return quality

    def measure_heads(self, heads: tuple[Budget, ...], budget: int) -> DecodeQuality:
        """The same of the budgets ``heads`` of every layer's KV heads, ``budget`` keys or none."""
        which = hashlib.sha256(repr(heads).encode()).hexdigest()[:16]
        name = f"decode, {self.length} tokens, {budget} keys of heads {which}"
        kl: dict[str, float] = {}
        quality = DecodeQuality(budget=budget, length=self.length, kl=kl, heads=heads)
        self._measure_kinds(self.reading(heads), quality, kl, name)
        return quality

    def _measure_kinds(
        self, rule: HeadwiseConfig, quality: DecodeQuality, kl: dict[str, float], name: str
    ) -> None:
        """Fills ``kl``, that of the ``quality``, up to the first kind that loses too much."""
        for kind in self._windows:

            def measure(kind: str = kind) -> float:
                return self._measure_kind(rule, kind)

            kl[kind] = self._notes.recall(f"{name}: {kind}", measure)
            if not quality.is_harmless:
                self._windows = beginning_with(kind, self._windows)
                break

    def _by(self, budget: int) -> HeadwiseConfig:
        return self.reading(grow_decode_budgets(self._table, self._base, self._grown, least=budget))

    def reading(self, decode_budgets: Sequence[Budget]) -> HeadwiseConfig:
        """The rule that has these budgets of every layer's KV heads."""
        return replace(
            self.prefill, decode_attention="headwise", decode_budgets=tuple(decode_budgets)
        )

    def _measure_kind(self, by_budgets: HeadwiseConfig, kind: str) -> float:
        """Mean KL of a kind of text, in nats."""
        texts = self._windows[kind]
        kl = self._compare(by_budgets, texts)
        if kl > kl_limit(kind):
            kl = max(0.0, kl - self._compare(self.least, texts))
        self._steps.advance(self._window_steps * len(texts))
        return round(kl, 6)

    def _compare(self, rule: HeadwiseConfig, texts: Sequence[Window]) -> float:
        runners = [
            self._llm.start_runner(self.length, attention=each) for each in (self.prefill, rule)
        ]
        divergences = []
        for window in texts:
            (scores,) = compare_decodes(
                runners, window, DECODED, on_tokens=lambda _: None, shares_prompt=True
            )
            divergences.append(float(scores.kl.mean()))
        return float(np.mean(divergences))
