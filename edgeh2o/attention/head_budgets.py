"""Budgets of a model's heads: by its table, by what prompts taught, or none as nothing is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from .base import AttentionModel, has_equal_kv_heads, require_measurable
from .budget_points import SHOWN_LENGTH, Points, budget_of_length
from .budget_table import Budget, BudgetTable, find_table, read_table
from .kept_profiles import find_profile
from .prefill_quality import DEFAULT_MAX_LOSS

DEFAULT_BUDGET = 1024
# With a profile, which says less than a calibration does.
PROFILE_BUDGET = 1536
# Tokens of a prompt for which the default budget comes to that of a profile.
PROFILE_LENGTH = 2 * SHOWN_LENGTH
PROFILE_POINTS = ((PROFILE_LENGTH, PROFILE_BUDGET),)
LIMIT_STEP = 16
# The mean by which a table says which heads have limits grows by this power of the mean's growth:
# by an eighth for every doubling. Without it lists of facts lost 0.8 % at 8,192 tokens.
REACH_GROWTH = 0.3
# Of a profiled query head's error, what it has from those that share its KV head: a prompt does not
# show all that they look for.
SHARED_ERROR = 0.3
UNKNOWN = "dense: nothing is known of this model yet"
TOO_LOSSY = f"dense: no calibrated budget loses less than {DEFAULT_MAX_LOSS} %"
TOO_SHORT = "dense: sparse would not be faster at this length"
NO_ATTENTION = "dense: no layer of this model attends"
UNIFORM = "uniform"
# Sources of budgets without a limit.
DENSE_SOURCES = (UNKNOWN, TOO_LOSSY, TOO_SHORT, NO_ATTENTION)
# Instead of a file: no table, whether of the cache folder or of the package.
NO_TABLE = "none"


@dataclass(frozen=True, slots=True)
class HeadBudgets:
    """Keys per layer and KV head, or query head, their intended mean, and where they come from.

    ``prompts`` have said something of a model that may be profiled; None for others. For those that
    a ``table`` gave, ``points`` say what mean serves prompts of other lengths.
    """

    per_head: tuple[Budget, ...]
    mean: int
    source: str
    prompts: int | None = None
    by_query_head: bool = False
    table: BudgetTable | None = None
    points: Points = ()

    def mean_for(self, n_tokens: int) -> int | None:
        """The mean that serves a prompt of ``n_tokens``; None for budgets of no table."""
        return budget_of_length(self.points, n_tokens) if self.table is not None else None

    def grown(self, mean: int) -> HeadBudgets:
        """Those of longer prompts, for which ``mean`` stands; these if they are of no table."""
        if self.table is None or mean == self.mean:
            return self
        return replace(self, per_head=grow_budgets(self.table, self.mean, mean), mean=mean)

    def of_decode(self, found: HeadBudgets, *, is_asked_for: bool) -> tuple[Budget, ...] | None:
        """Those of generated tokens per KV head, None where there are none; ``found`` serves
        shorter prompts.

        Those that were measured, unless decode by budgets ``is_asked_for``, or as many keys at
        least, whose limits grow with the prompt as its own do.
        """
        if self.table is None:
            return None if self.by_query_head else self.per_head
        quality = None if is_asked_for else self.table.decode
        if quality is not None and quality.heads is not None:
            return quality.heads
        least = quality.budget if quality else 0
        return grow_decode_budgets(self.table, found.mean, self.mean, least=least)

    def is_shown(self, mean: int) -> bool:
        """Whether it was measured that prompts lose nothing with so many keys under the guard.

        Of prompts as long as the measured ones, which have the keys that those had.
        """
        shown = self.table.shown if self.table else ()
        if not shown or self.points[0][1] < shown[0].budget:
            return False
        return mean <= budget_of_length(self.points, shown[-1].length)

    @property
    def serve_decode(self) -> bool:
        """Whether generated tokens may go by them too, by what was measured."""
        measured = self.table.decode if self.table else None
        return measured is not None and measured.is_harmless

    @property
    def decode_limit(self) -> int | None:
        """Tokens of the longest prompt of which that was measured; None for budgets of no table."""
        measured = self.table.decode if self.table else None
        return measured.length if measured is not None else None

    @property
    def reads_all(self) -> bool:
        """Whether prompts are read dense, for want of anything better."""
        return self.source in DENSE_SOURCES


def grow_budgets(table: BudgetTable, mean: int, grown: int) -> tuple[Budget, ...]:
    """Budgets of prompts that get ``grown`` keys where shorter ones get ``mean`` of the table.

    Limits grow as the mean does, and a few more heads have none. By ``table.budgets(grown)``, whose
    limits end at a quarter of the calibration's texts, most heads would have none, which costs the
    more the longer a prompt is (docs/quality.md).
    """
    factor = grown / mean
    return grow_limits(table.budgets(mean * max(1.0, factor) ** REACH_GROWTH), factor)


def grow_decode_budgets(
    table: BudgetTable, mean: int, grown: int, *, least: int
) -> tuple[Budget, ...]:
    """Those of generated tokens per KV head, after prompts that get ``grown`` keys where shorter
    ones get ``mean`` of the table.

    Of ``least`` keys at least; the limits grow as those of prompts do.
    """
    keys = max(mean, least)
    return grow_limits(table.of_kv_heads().budgets(keys), max(grown, least) / keys)


def grow_limits(budgets: tuple[Budget, ...], factor: float) -> tuple[Budget, ...]:
    """Limits ``factor`` times as large, in steps of 16 keys; who reads everything still does."""
    if factor <= 1:
        return budgets
    return tuple(
        None if budget is None else math.ceil(budget * factor / LIMIT_STEP) * LIMIT_STEP
        for budget in budgets
    )


def keys_per_query(n_tokens: int, most: float) -> float:
    """Keys that a query of a causal prompt reads in the mean, if none reads more than ``most``."""
    most = min(most, n_tokens)
    return most - most * most / (2 * n_tokens) if n_tokens else 0.0


def known_points(table: BudgetTable, budget: int) -> Points:
    """Mean keys by length, where ``budget`` serves prompts as long as the table's texts.

    At least those by which longer prompts were shown to lose nothing.
    """
    own = ((table.length, budget),)
    shown = table.shown
    if not shown or budget < shown[0].budget:
        return own
    return tuple(
        (each.length, max(each.budget, budget_of_length(own, each.length))) for each in shown
    )


def find_budgets(
    model: AttentionModel,
    *,
    budget: int | None,
    max_loss: float | None,
    budget_table: str | None,
    profile: BudgetTable | None,
) -> HeadBudgets:
    """Those for a model by the settings of ``HeadwiseConfig``, which has their names.

    Query heads get budgets of their own where they may have memory sets of their own and what is
    known of the model says them. Raises FormatError for a table that cannot be used, UsageError for
    ``max_loss`` without a measured loss below it, and for it and a table where ``calibrate`` makes
    none.
    """
    if model.n_slots == 0:
        return HeadBudgets((), budget or PROFILE_BUDGET, NO_ATTENTION)
    found = _find_table(model, max_loss, budget_table, profile)
    if found is None:
        if max_loss is not None:
            raise UsageError(
                "--max-loss needs the measured losses of the model; make them once with "
                "`edgeh2o calibrate MODEL`, or give --budget"
            )
        prompts = 0 if has_equal_kv_heads(model) else None
        if budget is None:
            return HeadBudgets((None,) * model.n_slots, PROFILE_BUDGET, UNKNOWN, prompts)
        return HeadBudgets((budget,) * model.n_slots, budget, UNIFORM, prompts)
    table, source = found
    if not model.splits_groups:
        table = table.of_kv_heads()
    prompts = None
    if source == "profile":
        prompts = table.prompts
        table = table.smoothed(SHARED_ERROR)
        source = f"profile ({prompts} prompt{'s' if prompts > 1 else ''})"
        budget = budget or PROFILE_BUDGET
        points: Points = ((PROFILE_LENGTH, budget),)
    else:
        budget = budget or _budget_of_loss(table, max_loss)
        if budget is None:
            return HeadBudgets((None,) * model.n_slots, DEFAULT_BUDGET, TOO_LOSSY)
        points = known_points(table, budget)
    return HeadBudgets(
        table.budgets(budget),
        budget,
        source,
        prompts,
        by_query_head=table.n_heads > 0,
        table=table,
        points=points,
    )


def default_budget(table: BudgetTable) -> int | None:
    """That of a run that asks for none; None where the table has none that it may take."""
    # Tables that do not say what they read were made on plain prose and code.
    if not (table.texts and table.losses):
        return DEFAULT_BUDGET
    least, shown = table.smallest_budget(DEFAULT_MAX_LOSS), table.shown
    return max(least, shown[0].budget) if shown and least is not None else least


def _budget_of_loss(table: BudgetTable, max_loss: float | None) -> int | None:
    """The smallest that the table allows; None where none does and nobody asked for it."""
    if max_loss is None:
        return default_budget(table)
    budget = table.smallest_budget(max_loss)
    if budget is None:
        measured = ", ".join(
            f"{loss:.2f} % at {keys}" for keys, loss in sorted(table.losses.items())
        )
        raise UsageError(
            f"no calibrated budget keeps the loss below {max_loss} % "
            f"({measured or 'none was measured'}); allow more, or use --attention dense"
        )
    return budget


def _fits(table: BudgetTable, model: AttentionModel) -> bool:
    """Whether the layers and heads of a table are those of the model."""
    sizes = table.n_layers, table.n_kv_heads
    return sizes == (model.n_layers, model.n_kv_heads) and table.n_heads in (0, model.n_heads)


def _find_table(
    model: AttentionModel,
    max_loss: float | None,
    budget_table: str | None,
    profile: BudgetTable | None,
) -> tuple[BudgetTable, str] | None:
    """What is known of the model, and where that is from."""
    if profile is not None:
        return profile, "profile"
    if budget_table not in (None, NO_TABLE):
        require_measurable(model, "a budget table")
    elif max_loss is not None:
        require_measurable(model, "--max-loss needs a budget table, which")
    if not has_equal_kv_heads(model):
        return None
    if budget_table in (None, NO_TABLE):
        found = find_table(model.fingerprint) if budget_table is None else None
        if found is not None:
            return found
        kept = None if max_loss is not None else find_profile(model.fingerprint)
        if kept is None or not _fits(kept, model):
            return None
        # One of KV heads, of a version that had no others, is made anew.
        return None if model.splits_groups and not kept.n_heads else (kept, "profile")
    table = read_table(Path(str(budget_table)))
    if not _fits(table, model):
        heads = f" with {table.n_heads} query heads" if table.n_heads else ""
        raise UsageError(
            f"the budget table {budget_table} is for {table.n_layers} layers of "
            f"{table.n_kv_heads} KV heads{heads}, the model has {model.n_layers} of "
            f"{model.n_kv_heads} with {model.n_heads} query heads; make one with "
            "`edgeh2o calibrate MODEL`"
        )
    return table, "file"
