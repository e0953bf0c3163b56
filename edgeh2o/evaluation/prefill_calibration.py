"""Measures what prompts lose that are read by a table's budgets: its ``PrefillQuality``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..attention.dense import DenseConfig
from ..attention.head_budgets import SHOWN_LENGTH, budget_of_length, grow_budgets
from ..attention.headwise import ERROR_OF_DEFAULT_LOSS, HeadwiseConfig
from ..attention.prefill_quality import DEFAULT_MAX_LOSS, PrefillQuality, kl_limit
from ..config import PrefillConfig
from ..errors import ResourceError, UsageError
from ..runners.base import Runner
from .comparison import TokenScores, WindowComparer, estimate_loss, join_scores
from .long_texts import KINDS, Window, make_window
from .progress import StepsLeft

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..llm import LLM

_SEEDS = (0, 1)
# What loses most comes first, so that too small a budget is given up early.
_FIRST_KINDS = ("pairs", "facts", "table", "dialogue")
# Of twice the length, where budgets grow, by one seed.
_LONG_KINDS = ("pairs", "facts", "dialogue")
# A window of twice the length takes about as long as so many others.
_LONG_STEPS = 3
# Predictions of a window that count, which ask for what stands before.
_SCORED = 1 / 4


@dataclass(frozen=True, slots=True)
class PrefillWindows:
    """By kind of text, of the length of a calibration and, unless there are none, of twice that."""

    plain: Mapping[str, Sequence[Window]]
    long: Mapping[str, Sequence[Window]]

    @property
    def n_steps(self) -> int:
        """Calls of ``on_step`` for one budget."""
        n_plain, n_long = (sum(map(len, each.values())) for each in (self.plain, self.long))
        return n_plain + _LONG_STEPS * n_long


def make_prefill_windows(llm: LLM, length: int) -> PrefillWindows:
    """Windows of other texts than those that a calibration reads.

    Raises UsageError for a ``length`` that the texts do not fill; where they do not fill twice that
    or the model was not trained on it, there are no long ones.
    """
    kinds = [kind for kind in _FIRST_KINDS if kind in KINDS]
    kinds += [kind for kind in KINDS if kind not in _FIRST_KINDS]
    plain = {kind: [make_window(llm, kind, length, seed=seed) for seed in _SEEDS] for kind in kinds}
    long: dict[str, list[Window]] = {}
    if 2 * length <= llm.config.context_length:
        try:
            long = {kind: [make_window(llm, kind, 2 * length, seed=0)] for kind in _LONG_KINDS}
        except UsageError:
            long = {}
    return PrefillWindows(plain, long)


def count_prefill_steps(windows: PrefillWindows, n_budgets: int) -> int:
    """Calls of ``on_step`` that ``find_prefill`` makes."""
    return n_budgets * windows.n_steps


def find_prefill(
    llm: LLM,
    table: BudgetTable,
    windows: PrefillWindows,
    *,
    on_step: Callable[[], None],
) -> PrefillQuality | None:
    """The quality of the least budget that is harmless in windows of all lengths.

    Else of the least that is in the shorter ones, or of the largest that was tried. Only budgets
    are tried whose mean loss in ``table.losses`` is one that a default run may have; None where
    there is none. ``on_step`` is called once per window and budget of the table. Raises
    ResourceError when two sessions do not fit in memory.
    """
    steps = StepsLeft(count_prefill_steps(windows, len(table.losses)), on_step)
    least = table.smallest_budget(DEFAULT_MAX_LOSS)
    tried = [budget for budget in sorted(table.losses) if least is not None and budget >= least]
    found = None
    for budget in tried:
        quality = measure_prefill(llm, table, budget, windows.plain, on_step=steps.advance)
        longer = _measure_long(llm, table, budget, windows, steps) if quality.is_harmless else None
        joined = quality if longer is None else quality.joined(longer)
        if joined.is_harmless:
            found = joined
            break
        # What serves the shorter prompts alone is better than nothing, with few keys.
        if found is None or not found.is_harmless:
            found = quality
    steps.finish()
    return found


def _measure_long(
    llm: LLM,
    table: BudgetTable,
    budget: int,
    windows: PrefillWindows,
    steps: StepsLeft,
) -> PrefillQuality | None:
    """What the budget comes to in the long windows; None where there are none, or no room."""
    if not windows.long:
        return None
    on_step = partial(steps.advance, _LONG_STEPS)
    try:
        return measure_prefill(llm, table, budget, windows.long, on_step=on_step)
    except ResourceError:
        return None


def measure_prefill(
    llm: LLM,
    table: BudgetTable,
    budget: int,
    windows: Mapping[str, Sequence[Window]],
    *,
    on_step: Callable[[], None],
) -> PrefillQuality:
    """Compares prefills by a mean ``budget`` of a table with dense ones.

    The last quarter of every window's predictions counts. The budgets are those that a default run
    takes for the windows' length, and so are the guard and the products, if a measurement of the
    table says which. Where weights are quantised a difference in a last bit sends what follows
    another way: a KL above the limit is taken less what two dense reads in other chunks differ by.
    Kinds that come after one that loses too much are not read. Raises ResourceError when two
    sessions do not fit in memory.
    """
    length = len(next(iter(windows.values()))[0])
    grown = budget_of_length(budget, length, max(SHOWN_LENGTH, table.length))
    attention = HeadwiseConfig(
        budgets=grow_budgets(table, budget, grown),
        by_query_head=table.n_heads > 0,
    )
    is_rounded = table.rounding is not None and table.rounding.is_harmless
    sparse = llm.start_runner(
        length,
        attention=attention,
        prefill=replace(llm.prefill, max_error=ERROR_OF_DEFAULT_LOSS),
        all_rows=True,
        is_rounded=is_rounded,
    )
    comparer = WindowComparer(_start_dense(llm, length, prefill=llm.prefill))

    def compare(other: Runner, texts: Sequence[Window]) -> TokenScores:
        first = length - 1 - round(_SCORED * length)
        return join_scores([comparer.compare(other, text, first=first) for text in texts])

    loss: dict[str, float] = {}
    error: dict[str, float] = {}
    kl: dict[str, float] = {}
    quality = PrefillQuality(budget=budget, length=length, loss=loss, loss_error=error, kl=kl)
    for kind, texts in windows.items():
        scores = compare(sparse, texts)
        estimate = estimate_loss(scores.sparse_nll - scores.dense_nll)
        loss[kind], error[kind] = (round(percent, 4) for percent in estimate)
        divergence = float(scores.kl.mean())
        if divergence > kl_limit(kind):
            chunks = replace(llm.prefill, chunk_size=HeadwiseConfig.preferred_chunk_size)
            again = compare(_start_dense(llm, length, prefill=chunks), texts)
            divergence = max(0.0, divergence - float(again.kl.mean()))
        kl[kind] = round(divergence, 6)
        for _ in texts:
            on_step()
        if quality.is_hopeless:
            break
    return quality


def _start_dense(llm: LLM, length: int, *, prefill: PrefillConfig) -> Runner:
    return llm.start_runner(
        length, attention=DenseConfig(), prefill=prefill, all_rows=True, is_rounded=False
    )
