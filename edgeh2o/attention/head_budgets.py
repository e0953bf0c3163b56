"""Budgets of a model's heads: by its table, by what prompts taught, or none as nothing is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from .base import AttentionModel, has_equal_kv_heads, require_measurable
from .budget_table import Budget, BudgetTable, find_table, read_table
from .kept_profiles import find_profile
from .prefill_quality import DEFAULT_MAX_LOSS

DEFAULT_BUDGET = 1024
# With a profile, which says less than a calibration does.
PROFILE_BUDGET = 1536
# Tokens of a prompt up to which the default budget was shown to be harmless, and those for which it
# comes to that of a profile.
SHOWN_LENGTH = 4096
PROFILE_LENGTH = 2 * SHOWN_LENGTH
# Of a budget, for every doubling of the prompt beyond: with 1,024 keys prompts of 8,192 tokens lost
# up to 1.3 %, with 1,536 no more than the default may (docs/quality.md).
GROWTH = 1.5
BUDGET_STEP = 64
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
UNIFORM = "uniform"
# Sources of budgets without a limit.
DENSE_SOURCES = (UNKNOWN, TOO_LOSSY, TOO_SHORT)
# Instead of a file: no table, whether of the cache folder or of the package.
NO_TABLE = "none"


@dataclass(frozen=True, slots=True)
class HeadBudgets:
    """Keys per layer and KV head, or query head, their intended mean, and where they come from.

    ``prompts`` have said something of a model that may be profiled; None for others. Of those that
    a ``table`` gave, ``mean`` serves prompts of ``shown_length`` tokens.
    """

    per_head: tuple[Budget, ...]
    mean: int
    source: str
    prompts: int | None = None
    by_query_head: bool = False
    table: BudgetTable | None = None
    shown_length: int = SHOWN_LENGTH

    def grown(self, mean: int) -> HeadBudgets:
        """Those of longer prompts, for which ``mean`` stands; these if they are of no table."""
        if self.table is None or mean == self.mean:
            return self
        return replace(self, per_head=grow_budgets(self.table, self.mean, mean), mean=mean)

    def of_decode(self, found: HeadBudgets, *, is_asked_for: bool) -> tuple[Budget, ...] | None:
        """Those of generated tokens per KV head, None where there are none; ``found`` serves
        shorter prompts.

        At least those that were measured, unless decode by budgets ``is_asked_for``; their limits
        grow with the prompt as its own do.
        """
        if self.table is None:
            return None if self.by_query_head else self.per_head
        quality = None if is_asked_for else self.table.decode
        least = quality.budget if quality else 0
        mean = max(found.mean, least)
        return grow_limits(self.table.of_kv_heads().budgets(mean), max(self.mean, least) / mean)

    def is_shown(self, mean: int) -> bool:
        """Whether it was measured that prompts lose nothing with so many keys under the guard.

        Of prompts as long as the measured ones, which have the keys that those had.
        """
        measured = self.table.prefill if self.table else None
        if measured is None or not measured.is_harmless:
            return False
        most = budget_of_length(self.mean, measured.length, self.shown_length)
        return measured.budget <= mean <= most

    @property
    def serve_decode(self) -> bool:
        """Whether generated tokens may go by them too, by what was measured."""
        measured = self.table.decode if self.table else None
        return measured is not None and measured.is_harmless

    @property
    def reads_all(self) -> bool:
        """Whether prompts are read dense, for want of anything better."""
        return self.source in DENSE_SOURCES


def keys_per_query(n_tokens: int, most: float) -> float:
    """Keys that a query of a causal prompt reads in the mean, if none reads more than ``most``."""
    most = min(most, n_tokens)
    return most - most * most / (2 * n_tokens) if n_tokens else 0.0


def budget_of_length(budget: int, n_tokens: int, shown_length: int = SHOWN_LENGTH) -> int:
    """Keys for a prompt of ``n_tokens``, by the ``budget`` that serves ``shown_length`` tokens.

    Half as many again for every doubling beyond, in steps of 64; never more than the prompt has.
    """
    if n_tokens <= shown_length:
        return budget
    grown: float = budget * GROWTH ** math.log2(n_tokens / shown_length)
    # A last bit that rounding added is no reason for another step.
    steps = math.ceil(round(grown / BUDGET_STEP, 6))
    return max(budget, min(steps * BUDGET_STEP, n_tokens))


def grow_budgets(table: BudgetTable, mean: int, grown: int) -> tuple[Budget, ...]:
    """Budgets of prompts that get ``grown`` keys where shorter ones get ``mean`` of the table.

    Limits grow as the mean does, and a few more heads have none. By ``table.budgets(grown)``, whose
    limits end at a quarter of the calibration's texts, most heads would have none, which costs the
    more the longer a prompt is (docs/quality.md).
    """
    factor = grown / mean
    return grow_limits(table.budgets(mean * max(1.0, factor) ** REACH_GROWTH), factor)


def grow_limits(budgets: tuple[Budget, ...], factor: float) -> tuple[Budget, ...]:
    """Limits ``factor`` times as large, in steps of 16 keys; who reads everything still does."""
    if factor <= 1:
        return budgets
    return tuple(
        None if budget is None else math.ceil(budget * factor / LIMIT_STEP) * LIMIT_STEP
        for budget in budgets
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
    prompts, shown_length = None, max(SHOWN_LENGTH, table.length)
    if source == "profile":
        prompts, shown_length = table.prompts, PROFILE_LENGTH
        table = table.smoothed(SHARED_ERROR)
        source = f"profile ({prompts} prompt{'s' if prompts > 1 else ''})"
        budget = budget or PROFILE_BUDGET
    else:
        budget = budget or _budget_of_loss(table, max_loss)
        if budget is None:
            return HeadBudgets((None,) * model.n_slots, DEFAULT_BUDGET, TOO_LOSSY)
    return HeadBudgets(
        table.budgets(budget),
        budget,
        source,
        prompts,
        by_query_head=table.n_heads > 0,
        table=table,
        shown_length=shown_length,
    )


def default_budget(table: BudgetTable) -> int | None:
    """That of a run that asks for none; None where the table has none that it may take."""
    # Tables that do not say what they read were made on plain prose and code.
    if not (table.texts and table.losses):
        return DEFAULT_BUDGET
    least, measured = table.smallest_budget(DEFAULT_MAX_LOSS), table.prefill
    if least is None or measured is None or not measured.is_harmless:
        return least
    return max(least, measured.budget)


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
