"""Measures what generated tokens lose that read by a table's budgets: its ``DecodeQuality``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..attention.decode_quality import DecodeQuality
from ..attention.headwise_settings import DECODE_FROM
from ..errors import ResourceError, UsageError
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, count_windows, window_length
from .decode_heads import count_head_steps, find_heads
from .decode_meter import DECODED, LONG_STEPS, WINDOW_STEPS, DecodeMeter
from .progress import Progress, Steps

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..llm import LLM

LEAST_LENGTH = DECODE_FROM + DECODED
# Keys of generated tokens that are tried. They need not be those of prompts: with 512 of query
# heads prompts of SmolLM2-135M lose nothing, and decode by 512 of KV heads has a KL of 14e-3.
_BUDGETS = (1024, 1280, 1536)
# More of them, after prompts of twice the length only.
_LONG_BUDGETS = (1792, 2048)
# Of the rows of a prompt, what generated tokens may read of it: with more, little is gained.
_WORTHWHILE = 3 / 4


def require_decodable(length: int) -> None:
    """Raises UsageError for windows whose prompt would be read whole, as a short one is."""
    if length < LEAST_LENGTH:
        raise UsageError(
            f"to measure decode, windows need at least {LEAST_LENGTH} tokens, got {length}; use a "
            "larger --length, or leave out --decode"
        )


def count_decode_steps(windows: Windows, long: Windows) -> int:
    """Steps of ``find_decode``, each about as long as a read of a window."""
    n_long = len(_BUDGETS + _LONG_BUDGETS) * LONG_STEPS * count_windows(long)
    n_own = len(_BUDGETS) * WINDOW_STEPS * count_windows(windows)
    return n_own + n_long + count_head_steps(windows, long)


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
    many keys are harmless after those too, the quality is that of both lengths. Where they are not,
    or no number of keys is at the shorter length, some KV heads read everything and all others so
    many keys, if that is harmless, and spares more rows than what is known to be. Else more keys
    are tried after the longer ones, and the quality is of both lengths or of the shorter one.
    ``progress`` makes ``count_decode_steps``. Raises ResourceError when two sessions of the shorter
    length do not fit in memory.
    """
    steps = Steps(progress, count_decode_steps(windows, long), size=llm.config.n_layers)
    meter = DecodeMeter(llm, table, base, windows, steps, notes)
    find = partial(find_heads, llm, table, base, windows, long, steps, notes)
    for budget in sorted({max(base, least) for least in _BUDGETS}):
        short = meter.measure(budget)
        if short.is_harmless:
            break
    try:
        if not short.is_harmless:
            kind = list(short.kl)[-1]
            n_prompt = window_length(long or windows) - DECODED
            found = find(
                kind=kind if kind in (long or windows) else None, most_rows=_WORTHWHILE * n_prompt
            )
        elif long:
            spared = meter.n_prompt - meter.count_rows(short.budget)
            long_meter = DecodeMeter(llm, table, base, long, steps, notes)
            found = _find_longer(long_meter, short, spared, find)
        else:
            found = None
    except ResourceError:
        found = None
    steps.finish()
    return found or short


def _find_longer(
    meter: DecodeMeter,
    short: DecodeQuality,
    spared: float,
    find: Callable[..., DecodeQuality | None],
) -> DecodeQuality | None:
    """That of both lengths, where ``short`` spares so many rows at the shorter one.

    None where nothing that is worth a try is harmless. ``find`` is ``find_heads``.
    """
    most_rows = _WORTHWHILE * meter.n_prompt
    tried = [
        budget
        for budget in sorted({short.budget, *_BUDGETS, *_LONG_BUDGETS})
        if budget >= short.budget and meter.count_rows(budget) <= most_rows
    ]
    kind = None
    for budget in tried[:1]:
        quality = meter.measure(budget)
        if quality.is_harmless:
            return quality.joined(short)
        kind = list(quality.kl)[-1]
    by_heads = find(kind=kind, most_rows=min(most_rows, meter.n_prompt - spared))
    if by_heads is not None:
        return by_heads
    for budget in tried[1:]:
        quality = meter.measure(budget)
        if quality.is_harmless:
            return quality.joined(short)
    return None
