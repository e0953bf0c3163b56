"""Measures what generated tokens lose that read by a table's budgets: its ``DecodeQuality``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention.decode_quality import DecodeQuality, kl_limit
from ..attention.headwise import HeadwiseConfig
from ..attention.headwise_settings import DECODE_FROM
from ..errors import UsageError
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
# A window takes about as long as so many of the other steps of a calibration.
_WINDOW_STEPS = 2
# Of the prompt, what the one head keeps that shows how far rounding carries a small difference.
_KEPT_SHARE = 7 / 8


def require_decodable(length: int) -> None:
    """Raises UsageError for windows whose prompt would be read whole, as a short one is."""
    if length < LEAST_LENGTH:
        raise UsageError(
            f"to measure decode, windows need at least {LEAST_LENGTH} tokens, got {length}; use a "
            "larger --length, or leave out --decode"
        )


def count_decode_steps(windows: Windows) -> int:
    """Steps of ``find_decode``, each about as long as a read of a window."""
    return len(_BUDGETS) * _WINDOW_STEPS * count_windows(windows)


def find_decode(
    llm: LLM,
    table: BudgetTable,
    budget: int,
    windows: Windows,
    progress: Progress,
    notes: CalibrationNotes,
) -> DecodeQuality:
    """The quality of the least budget that is harmless, or of the largest that was tried.

    At least ``budget``, that of prompts. ``progress`` makes ``count_decode_steps``. Raises as
    ``measure_decode``, of which ``windows`` are too.
    """
    steps = Steps(progress, count_decode_steps(windows), size=llm.config.n_layers)
    for tried in sorted({max(budget, least) for least in _BUDGETS}):
        quality = measure_decode(llm, table, tried, windows, steps, notes)
        if quality.is_harmless:
            break
        *_, given_up = quality.kl
        windows = beginning_with(given_up, windows)
    steps.finish()
    return quality


def measure_decode(
    llm: LLM,
    table: BudgetTable,
    budget: int,
    windows: Windows,
    steps: Steps,
    notes: CalibrationNotes,
) -> DecodeQuality:
    """Compares decode by a mean ``budget`` of a table with dense decode.

    Of ``windows`` of a length that is ``require_decodable`` the last 256 tokens are decoded as they
    stand, after the same sparse prefill. Kinds that come after one that loses too much are not
    read. Raises ResourceError when two sessions do not fit in memory.
    """
    meter = _DecodeMeter(llm, table, budget, window_length(windows))
    kl: dict[str, float] = {}
    quality = DecodeQuality(budget=budget, length=meter.length, kl=kl)
    for kind, texts in windows.items():

        def measure(kind: str = kind, texts: Sequence[Window] = texts) -> float:
            divergence = meter.measure(kind, texts)
            steps.advance(_WINDOW_STEPS * len(texts))
            return divergence

        kl[kind] = notes.recall(f"decode, {budget} keys: {kind}", measure)
        if not quality.is_harmless:
            break
    return quality


class _DecodeMeter:
    """Compares decode by budgets with dense decode, in windows of ``length`` tokens.

    Where weights are quantised, activations are rounded to 8 bits before every product, and a
    difference in the last bit of one head sends what follows another way: of a divergence above the
    limit is taken off what comes of a rule by which one head of the first layer leaves out an
    eighth, and all others nothing.
    """

    def __init__(self, llm: LLM, table: BudgetTable, budget: int, length: int) -> None:
        self._llm = llm
        self.length = length
        self._prefill = HeadwiseConfig(
            budgets=table.budgets(budget),
            by_query_head=table.n_heads > 0,
            decode_attention="dense",
        )
        self._budgets = table.of_kv_heads().budgets(budget)
        least: list[Budget] = [None] * (table.n_layers * table.n_kv_heads)
        least[0] = max(1, round(_KEPT_SHARE * (length - DECODED)) - HeadwiseConfig().local)
        self._least = tuple(least)

    def measure(self, kind: str, texts: Sequence[Window]) -> float:
        """Mean KL of a kind of text, in nats."""
        kl = self._compare(self._budgets, texts)
        if kl > kl_limit(kind):
            kl = max(0.0, kl - self._compare(self._least, texts))
        return round(kl, 6)

    def _compare(self, budgets: tuple[Budget, ...], texts: Sequence[Window]) -> float:
        by_budgets = replace(self._prefill, decode_attention="headwise", decode_budgets=budgets)
        runners = [
            self._llm.start_runner(self.length, attention=each)
            for each in (self._prefill, by_budgets)
        ]
        divergences = []
        for window in texts:
            (scores,) = compare_decodes(
                runners, window, DECODED, on_tokens=lambda _: None, shares_prompt=True
            )
            divergences.append(float(scores.kl.mean()))
        return float(np.mean(divergences))
