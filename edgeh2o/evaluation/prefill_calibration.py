"""Measures what prompts lose that are read by a table's budgets: its ``PrefillQuality``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..attention.budget_points import BUDGET_STEP, budget_of_length
from ..attention.dense import DenseConfig
from ..attention.head_budgets import grow_budgets
from ..attention.headwise import ERROR_OF_DEFAULT_LOSS, HeadwiseConfig
from ..attention.prefill_quality import DEFAULT_MAX_LOSS, PrefillQuality, kl_limit
from ..config import PrefillConfig
from ..errors import ResourceError
from ..runners.base import Runner
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, beginning_with, count_windows, window_length
from .comparison import TokenScores, WindowComparer, estimate_loss, join_scores
from .progress import Progress, Steps

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..llm import LLM

# A window is read densely and by a budget; one of twice the length takes about twice as long.
_WINDOW_STEPS, _LONG_STEPS = 2, 4
# Of what a budget grows to at twice the length, what is tried there.
_LONG_FACTORS = (1, 7 / 6, 4 / 3, 3 / 2, 5 / 3)
# Of the keys that dense prompts read: with more, little is gained by a sparse one.
_WORTHWHILE = 0.6
# Predictions of a window that count, which ask for what stands before.
_SCORED = 1 / 4


def count_prefill_steps(windows: Windows, long: Windows, n_budgets: int) -> int:
    """Steps of ``find_prefill``, each about as long as a read of a window."""
    n_long = len(_LONG_FACTORS) * _LONG_STEPS * count_windows(long)
    return n_budgets * _WINDOW_STEPS * count_windows(windows) + n_long


def find_prefill(
    llm: LLM,
    table: BudgetTable,
    windows: Windows,
    long: Windows,
    progress: Progress,
    notes: CalibrationNotes,
) -> tuple[PrefillQuality, ...]:
    """The quality of the least budget that is harmless, or of the largest that was tried.

    Only budgets are tried whose mean loss in ``table.losses`` is one that a default run may have;
    empty where there is none. ``long`` has windows of twice the length, or none: the second quality
    is of the least budget that is harmless there too, if one that is worth it is. ``progress``
    makes ``count_prefill_steps``. Raises ResourceError when two sessions do not fit in memory.
    """
    n_steps = count_prefill_steps(windows, long, len(table.losses))
    steps = Steps(progress, n_steps, size=llm.config.n_layers)
    least = table.smallest_budget(DEFAULT_MAX_LOSS)
    tried = [budget for budget in sorted(table.losses) if least is not None and budget >= least]
    found: tuple[PrefillQuality, ...] = ()
    if tried:
        meter = PrefillMeter(llm, table, windows, steps, notes)
        found = (_find_least(meter, tried),)
    if found and found[0].is_harmless and long:
        found += _find_longer(llm, table, found[0].budget, long, steps, notes)
    steps.finish()
    return found


def _find_longer(
    llm: LLM,
    table: BudgetTable,
    base: int,
    long: Windows,
    steps: Steps,
    notes: CalibrationNotes,
) -> tuple[PrefillQuality, ...]:
    """The quality of the least budget that is harmless there; empty for none, or no room."""
    length = window_length(long)
    grown = budget_of_length(((table.length, base),), length)
    tried = [round(factor * grown / BUDGET_STEP) * BUDGET_STEP for factor in _LONG_FACTORS]
    worthwhile = [
        budget
        for budget in tried
        if HeadwiseConfig().mean_keys(grow_budgets(table, base, budget), length)
        <= _WORTHWHILE * length / 2
    ]
    if not worthwhile:
        return ()
    try:
        meter = PrefillMeter(llm, table, long, steps, notes, base)
        quality = _find_least(meter, worthwhile)
    except ResourceError:
        return ()
    return (quality,) if quality.is_harmless else ()


def _find_least(meter: PrefillMeter, tried: Sequence[int]) -> PrefillQuality:
    """The quality of the first that is harmless, or of the last."""
    for budget in tried:
        quality = meter.measure(budget)
        if quality.is_harmless:
            break
    return quality


class PrefillMeter:
    """Compares prefills by budgets of a table with dense ones, in windows of one length by kind.

    The last quarter of every window's predictions counts. Budgets are those of a table, or such of
    its ``base`` that are grown for longer prompts; the guard is that of a default run, and so are
    the products, if a measurement of the table says which. Where weights are quantised a difference
    in a last bit sends what follows another way: a KL above the limit is taken less what two dense
    reads in other chunks differ by. Raises ResourceError when two sessions do not fit in memory.
    """

    def __init__(
        self,
        llm: LLM,
        table: BudgetTable,
        windows: Windows,
        steps: Steps,
        notes: CalibrationNotes,
        base: int | None = None,
    ) -> None:
        self._llm = llm
        self._table = table
        self._windows = windows
        self._steps, self._notes = steps, notes
        self._base = base
        self._length = window_length(windows)
        self._comparer = WindowComparer(self._start_dense(llm.prefill))
        # By kind, as far as they were asked for: they are those of every budget.
        self._rounding: dict[str, float] = {}

    def measure(self, budget: int) -> PrefillQuality:
        """What a mean ``budget`` loses.

        Kinds that come after one that loses too much are not read, and the next budget begins with
        that one. Raises ResourceError as the class does.
        """
        sparse = self._start_sparse(budget)
        loss: dict[str, float] = {}
        error: dict[str, float] = {}
        kl: dict[str, float] = {}
        quality = PrefillQuality(
            budget=budget, length=self._length, loss=loss, loss_error=error, kl=kl
        )
        for kind in self._windows:

            def measure(kind: str = kind) -> Any:
                return self._compare_kind(sparse, kind)

            name = f"{self._length} tokens, {budget} keys from {self._base}: {kind}"
            loss[kind], error[kind], kl[kind] = self._notes.recall(name, measure)
            if quality.is_hopeless:
                self._windows = beginning_with(kind, self._windows)
                break
        return quality

    def _compare_kind(self, sparse: Runner, kind: str) -> tuple[float, float, float]:
        """Loss and its error, in percent, and KL, in nats."""
        scores = self._compare(sparse, kind)
        loss, error = estimate_loss(scores.sparse_nll - scores.dense_nll)
        kl = float(scores.kl.mean())
        if kl > kl_limit(kind):
            kl = max(0.0, kl - self._measure_rounding(kind))
        n_steps = _LONG_STEPS if self._base else _WINDOW_STEPS
        self._steps.advance(n_steps * len(self._windows[kind]))
        return round(loss, 4), round(error, 4), round(kl, 6)

    def _measure_rounding(self, kind: str) -> float:
        if kind not in self._rounding:
            chunks = replace(self._llm.prefill, chunk_size=HeadwiseConfig.preferred_chunk_size)
            scores = self._compare(self._start_dense(chunks), kind)
            self._rounding[kind] = float(scores.kl.mean())
        return self._rounding[kind]

    def _compare(self, other: Runner, kind: str) -> TokenScores:
        first = self._length - 1 - round(_SCORED * self._length)
        # The window that was read densely last comes first: it need not be read again.
        texts = sorted(self._windows[kind], key=self._comparer.holds, reverse=True)
        return join_scores([self._comparer.compare(other, text, first=first) for text in texts])

    def _start_sparse(self, budget: int) -> Runner:
        table = self._table
        attention = HeadwiseConfig(
            budgets=grow_budgets(table, self._base or budget, budget),
            by_query_head=table.n_heads > 0,
        )
        return self._llm.start_runner(
            self._length,
            attention=attention,
            prefill=replace(self._llm.prefill, max_error=ERROR_OF_DEFAULT_LOSS),
            all_rows=True,
            is_rounded=table.rounding is not None and table.rounding.is_harmless,
        )

    def _start_dense(self, prefill: PrefillConfig) -> Runner:
        return self._llm.start_runner(
            self._length,
            attention=DenseConfig(),
            prefill=prefill,
            all_rows=True,
            is_rounded=False,
        )
