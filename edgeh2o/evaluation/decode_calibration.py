"""Measures what generated tokens lose that read by a table's budgets: its ``DecodeQuality``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention.decode_quality import DecodeQuality
from ..attention.headwise import HeadwiseConfig
from ..attention.headwise_settings import DECODE_FROM
from ..errors import UsageError
from .calibration_windows import Windows, beginning_with, count_windows, window_length
from .decoding import compare_decodes
from .progress import StepsLeft

if TYPE_CHECKING:
    from ..attention.budget_table import Budget, BudgetTable
    from ..llm import LLM

DECODED = 256
LEAST_LENGTH = DECODE_FROM + DECODED
# Keys of generated tokens that are tried. They need not be those of prompts: with 512 of query
# heads prompts of SmolLM2-135M lose nothing, and decode by 512 of KV heads has a KL of 14e-3.
_BUDGETS = (1024, 1280, 1536)
# A window takes about as long as so many of the other steps of a calibration.
_WINDOW_STEPS = 4
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
    """Calls of ``on_step`` that ``find_decode`` makes."""
    return len(_BUDGETS) * _WINDOW_STEPS * count_windows(windows)


def find_decode(
    llm: LLM,
    table: BudgetTable,
    budget: int,
    windows: Windows,
    on_step: Callable[[], None],
) -> DecodeQuality:
    """The quality of the least budget that is harmless, or of the largest that was tried.

    At least ``budget``, that of prompts. ``on_step`` is called ``count_decode_steps`` times. Raises
    as ``measure_decode``, of which ``windows`` are too.
    """
    steps = StepsLeft(count_decode_steps(windows), on_step)
    for tried in sorted({max(budget, least) for least in _BUDGETS}):
        quality = measure_decode(llm, table, tried, windows, on_step=steps.advance)
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
    *,
    on_step: Callable[[], None],
) -> DecodeQuality:
    """Compares decode by a mean ``budget`` of a table with dense decode.

    Of ``windows`` of a length that is ``require_decodable`` the last 256 tokens are decoded as they
    stand, after the same sparse prefill. Kinds that come after one that loses too much are not
    read. Where weights are quantised, activations are rounded to 8 bits before every product, and a
    difference in the last bit of one head sends what follows another way. So what comes of a rule
    by which one head of the first layer leaves out an eighth, and all others nothing, is taken off.
    Raises ResourceError when three sessions do not fit in memory.
    """
    length = window_length(windows)
    least: list[Budget] = [None] * (table.n_layers * table.n_kv_heads)
    least[0] = max(1, round(_KEPT_SHARE * (length - DECODED)) - HeadwiseConfig().local)
    prefill = HeadwiseConfig(
        budgets=table.budgets(budget),
        by_query_head=table.n_heads > 0,
        decode_attention="dense",
    )
    by_budgets = (
        replace(prefill, decode_attention="headwise", decode_budgets=budgets)
        for budgets in (tuple(least), table.of_kv_heads().budgets(budget))
    )
    runners = [llm.start_runner(length, attention=each) for each in (prefill, *by_budgets)]
    kl: dict[str, float] = {}
    quality = DecodeQuality(budget=budget, length=length, kl=kl)
    for kind, texts in windows.items():
        divergences = []
        for window in texts:
            scores = compare_decodes(runners, window, DECODED, on_tokens=lambda _: None)
            divergences.append([float(each.kl.mean()) for each in scores])
            for _ in range(_WINDOW_STEPS):
                on_step()
        rounding, rule = np.mean(divergences, axis=0)
        kl[kind] = round(max(0.0, float(rule - rounding)), 6)
        if not quality.is_harmless:
            break
    return quality
