"""Measures what generated tokens lose that read by a table's budgets: its ``DecodeQuality``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..attention.decode_quality import DecodeQuality
from ..attention.headwise import DECODE_FROM, HeadwiseConfig
from ..errors import UsageError
from .decoding import compare_decodes
from .long_texts import KINDS, Window, make_window

if TYPE_CHECKING:
    from ..attention.budget_table import Budget, BudgetTable
    from ..llm import LLM

DECODED = 256
_SEEDS = (0, 1)
# Of the prompt, what the one head keeps that shows how far rounding carries a small difference.
_KEPT_SHARE = 7 / 8


def check_decode_length(length: int) -> None:
    """Raises UsageError for windows whose prompt would be read whole, as a short one is."""
    least = DECODE_FROM + DECODED
    if length < least:
        raise UsageError(
            f"to measure decode, windows need at least {least} tokens, got {length}; use a larger "
            "--length, or leave out --decode"
        )


def count_decode_steps() -> int:
    """Calls of ``on_step`` that ``measure_decode`` makes."""
    return 2 * len(KINDS) * len(_SEEDS)


def measure_decode(
    llm: LLM, table: BudgetTable, budget: int, length: int, *, on_step: Callable[[], None]
) -> DecodeQuality:
    """Compares decode by a mean ``budget`` of a table of KV heads with dense decode.

    Of two windows of ``length`` tokens of every kind of text the last 256 are decoded as they
    stand, after the same sparse prefill. Where weights are quantised, activations are rounded to 8
    bits before every product, and a difference in the last bit of one head sends what follows
    another way. So what comes of a rule by which one head of the first layer leaves out an eighth,
    and all others nothing, is taken off. Raises UsageError for windows that are too short, or
    longer than the texts, ResourceError when two sessions do not fit in memory.
    """
    check_decode_length(length)
    windows = {
        kind: [make_window(llm, kind, length, seed=seed) for seed in _SEEDS] for kind in KINDS
    }
    least: list[Budget] = [None] * (table.n_layers * table.n_kv_heads)
    least[0] = max(1, round(_KEPT_SHARE * (length - DECODED)) - table.chunk_size)
    rounding = _divergences(llm, tuple(least), windows, on_step)
    rule = _divergences(llm, table.budgets(budget), windows, on_step)
    kl = {kind: round(max(0.0, rule[kind] - rounding[kind]), 6) for kind in KINDS}
    return DecodeQuality(budget=budget, length=length, kl=kl)


def _divergences(
    llm: LLM,
    budgets: tuple[Budget, ...],
    windows: dict[str, list[Window]],
    on_step: Callable[[], None],
) -> dict[str, float]:
    """Mean KL(dense || headwise) of the decoded tokens of each kind, in nats."""
    length = len(next(iter(windows.values()))[0])
    runners = [
        llm.start_runner(length, attention=HeadwiseConfig(budgets=budgets, decode_attention=way))
        for way in ("dense", "headwise")
    ]
    result = {}
    for kind, texts in windows.items():
        parts = []
        for window in texts:
            scores = compare_decodes(runners, window, DECODED, on_tokens=lambda _: None)
            parts.append(float(scores.kl.mean()))
            on_step()
        result[kind] = float(np.mean(parts))
    return result
