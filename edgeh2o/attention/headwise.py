"""Heavy hitters with a budget of its own for every head.

A few heads carry most of the error that sparsity makes (retrieval and induction heads). They get
large budgets or the whole past, the others small ones, by a table that `edgeh2o calibrate`
measures once per model. They are query heads: of those that share a KV head one or two often need
most of the past and the others next to nothing. Scores are means over the queries that saw a key,
with decay, of the joint softmax weights; what a memory set leaves out is stood for by landmarks:
the mean key and value of the rest of every page. The last tokens of a prompt, which ask the
question, read everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .base import AttentionModel, SparseAttentionConfig, count_sets
from .budget_points import budget_of_length
from .budget_table import Budget, BudgetTable
from .head_budgets import (
    DEFAULT_BUDGET,
    DENSE_SOURCES,
    PROFILE_BUDGET,
    PROFILE_POINTS,
    TOO_SHORT,
    UNKNOWN,
    HeadBudgets,
    find_budgets,
    grow_limits,
    keys_per_query,
)
from .headwise_decode import count_decode_rows, decode_options, report_decode
from .headwise_saved import HELD, HELD_DENSE, HELD_PROFILE, fields_held, move_decode
from .headwise_settings import DECODE_FROM, HeadwiseSettings
from .kept_profiles import ENOUGH_PROMPTS, PROFILE_TOKENS
from .prefill_quality import DEFAULT_MAX_LOSS
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy

# The error of a layer's attention, in percent of its output, that goes with that loss. Losses
# follow the square of the error: see "The guard" in docs/quality.md.
ERROR_OF_DEFAULT_LOSS = 4.5
# With a profile, as prompts of prose do not show which heads look things up, and with tables of
# which nobody measured what prompts lose: losses follow errors otherwise on other models
# (docs/quality.md).
ERROR_OF_PROFILE = 1.0
# Of what the budgets of a profile leave out, what the guard reads besides (half of it on
# Qwen2.5-Coder-1.5B with 4,602 tokens, a seventh on SmolLM2-135M with 4,096).
GUARDED_SHARE = 1 / 4


@register_sparse_attention("headwise")
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadwiseConfig(HeadwiseSettings):
    """Mean keys per query and how they are chosen; see the module.

    Without ``budget_table`` the one of the model is looked up: in the cache folder, where
    `edgeh2o calibrate` writes it, then among those of the package, then the ``profile`` that
    ``LLM`` makes while it reads long prompts. As long as nothing is known every head reads its
    whole past, or ``budget`` keys if that is given; so do models whose layers differ in KV heads,
    always. ``max_loss`` needs a table; without it and ``budget`` the smallest budget with a loss
    of 0.5 % is taken, or everything is read if there is none. Unless ``budget`` is given, the
    limits of heads grow with the prompt, and a few more heads have none: to what the table was
    shown to need at longer lengths, and by half for every doubling beyond those, or 4,096 tokens
    (8,192 with a profile).
    ``budgets`` gives the budgets themselves, ``None`` for the whole past, one per KV head or,
    ``by_query_head``, one per query head, ``decode_budgets`` those of generated tokens, one per KV
    head, and ``source`` tells where they are from.
    Raises UsageError for values out of range.
    """

    def choose_budgets(self, model: AttentionModel) -> HeadBudgets:
        """The budgets for a model.

        Raises FormatError for a table that cannot be used, UsageError for ``max_loss`` without a
        measured loss below it, for ``budgets`` that do not fit the model, and for ``max_loss`` and
        a table where ``calibrate`` makes none.
        """
        if self.budgets is not None:
            self._check_budgets(model, self.budgets)
            mean = self.budget or DEFAULT_BUDGET
            return HeadBudgets(
                self.budgets, mean, self.source, self.prompts, by_query_head=self.by_query_head
            )
        return find_budgets(
            model,
            budget=self.budget,
            max_loss=self.max_loss,
            budget_table=self.budget_table,
            profile=self.profile,
        )

    def _check_budgets(self, model: AttentionModel, budgets: tuple[Budget, ...]) -> None:
        if self.by_query_head and not model.splits_groups:
            raise UsageError(
                "budgets of query heads (by_query_head) need a model on the CPU with as many heads "
                "in every layer, several to a KV head"
            )
        given = [("budgets", budgets, self.by_query_head)]
        if self.decode_budgets is not None:
            given.append(("decode_budgets", self.decode_budgets, False))
        for name, values, by_query_head in given:
            n_sets = count_sets(model, by_query_head=by_query_head)
            if len(values) != n_sets:
                raise UsageError(
                    f"{name} has {len(values)} entries; the {model.n_layers} layers of the model "
                    f"have {n_sets} {'query' if by_query_head else 'KV'} heads"
                )

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        chosen = self.choose_budgets(model)
        if not model.n_slots:  # no layer attends
            return _core.dense_policy()
        return _core.headwise_policy(
            chosen.per_head,
            by_query_head=chosen.by_query_head,
            local=self.local,
            sinks=self.sinks,
            decay=self.decay,
            page_size=self.landmark_size,
            spread=self.landmark_spread,
            max_past=self._max_past(chosen),
            tail=self.tail,
            **decode_options(self, self._decode_budgets(model, chosen, chosen)),
        )

    def _max_past(self, chosen: HeadBudgets) -> int:
        return 0 if chosen.reads_all else self.max_past

    def _decode(self, model: AttentionModel, chosen: HeadBudgets) -> str:
        """What ``decode_attention`` comes to."""
        if self.decode_attention != "auto":
            return self.decode_attention
        return "headwise" if chosen.serve_decode and model.decodes_by_rule else "dense"

    def _decode_budgets(
        self, model: AttentionModel, chosen: HeadBudgets, found: HeadBudgets
    ) -> tuple[Budget, ...] | None:
        """Those of generated tokens, None where they read everything.

        ``found`` are those of shorter prompts. Raises UsageError where there are none.
        """
        if self._decode(model, chosen) == "dense":
            return None
        if self.decode_budgets is not None:
            return self.decode_budgets
        budgets = chosen.of_decode(found, is_asked_for=self.decode_attention == "headwise")
        if budgets is None:
            raise UsageError(
                "generated tokens go by budgets of KV heads (decode_budgets), which budgets of "
                "query heads (by_query_head) do not give; give them too, or --decode-attention "
                "dense"
            )
        return budgets

    def default_max_error(self, resolved: SparseAttentionConfig) -> float | None:
        if self.budget is not None or self.budgets is not None:
            return None
        if self.max_loss is None and resolved.is_taught:
            return ERROR_OF_PROFILE
        loss = DEFAULT_MAX_LOSS if self.max_loss is None else self.max_loss
        return ERROR_OF_DEFAULT_LOSS * math.sqrt(loss / DEFAULT_MAX_LOSS)

    @property
    def mean_budget(self) -> int | None:
        return None if self.reads_all else self.budget

    def naming_budget(self, resolved: SparseAttentionConfig) -> HeadwiseConfig:
        if self.budget is not None or self.budgets is not None:
            return self
        return replace(self, budget=resolved.mean_budget, max_loss=None)

    def budget_for(self, resolved: SparseAttentionConfig, n_tokens: int) -> int | None:
        found = resolved.found if isinstance(resolved, HeadwiseConfig) else None
        if self.budget is not None or found is None or resolved.reads_all:
            return None
        return found.mean_for(n_tokens)

    def with_budget(
        self, resolved: SparseAttentionConfig, model: AttentionModel, budget: int
    ) -> SparseAttentionConfig:
        if not isinstance(resolved, HeadwiseConfig) or resolved.found is None:
            return resolved
        chosen = resolved.found.grown(budget)
        return replace(
            resolved,
            budgets=chosen.per_head,
            budget=chosen.mean,
            decode_attention=self._decode(model, chosen),
            decode_budgets=self._decode_budgets(model, chosen, resolved.found),
            is_shown=resolved.found.is_shown(budget),
        )

    def expected_keys(
        self, resolved: SparseAttentionConfig, n_tokens: int, reads_past: Sequence[bool]
    ) -> float | None:
        assert isinstance(resolved, HeadwiseConfig)
        by_hand = self.budget is not None or self.budgets is not None
        if by_hand or not resolved.budgets or not any(reads_past):
            return None
        if resolved.reads_all and resolved.profiled_prompts is None:
            return None  # it is dense for another reason
        if resolved.reads_all:
            budgets: tuple[Budget, ...] = (budget_of_length(PROFILE_POINTS, n_tokens),)
        else:  # as many heads in every layer
            n = len(resolved.budgets) // len(reads_past)
            budgets = tuple(b for i, b in enumerate(resolved.budgets) if reads_past[i // n])
        mean = self.mean_keys(budgets, n_tokens)
        return mean + (GUARDED_SHARE * (n_tokens / 2 - mean) if resolved.is_taught else 0.0)

    def mean_keys(self, budgets: Sequence[Budget], n_tokens: int) -> float:
        """Keys that a query of a prompt reads in the mean by ``budgets``, its chunk included."""
        chunk = self.preferred_chunk_size / 2
        full = self.max_past or n_tokens
        keys = [keys_per_query(n_tokens, (budget or full) + chunk) for budget in budgets]
        return sum(keys) / len(keys)

    @property
    def is_taught(self) -> bool:
        if self.source in ("cache", "file"):
            return not self.is_shown
        return self.prompts is not None or self.source == HELD_PROFILE

    @property
    def profiled_prompts(self) -> int | None:
        is_wanted = self.prompts is not None and self.prompts < ENOUGH_PROMPTS
        return self.prompts if is_wanted else None

    def with_profile(self, table: BudgetTable) -> HeadwiseConfig:
        return replace(self, profile=table)

    def reading_all(self, *, saves_time: bool = False) -> HeadwiseConfig:
        budgets = tuple(None for _ in self.budgets or ())
        # They do not depend on how a prompt is read.
        decode_budgets = self.decode_budgets if saves_time else None
        return replace(
            self,
            budgets=budgets or None,
            decode_attention="dense" if decode_budgets is None else "headwise",
            decode_budgets=decode_budgets,
            source=TOO_SHORT if saves_time else UNKNOWN,
            prompts=None if saves_time else self.prompts,
            max_past=0,
        )

    @property
    def reads_all(self) -> bool:
        return self.source in DENSE_SOURCES and not self.is_learning

    @property
    def is_learning(self) -> bool:
        return self.source == UNKNOWN and bool(self.budgets) and None not in (self.budgets or ())

    def learning(self, model: AttentionModel, context: int) -> HeadwiseConfig | None:
        if 0 < self.max_past < context:
            return None
        by_query_head = model.splits_groups
        # Room for every budget of a profile, and enough to keep all of what is read first.
        grown = budget_of_length(PROFILE_POINTS, context) / PROFILE_BUDGET
        (most,) = grow_limits((PROFILE_TOKENS,), grown)
        room = (most,) * count_sets(model, by_query_head=by_query_head)
        decodes = self.decode_attention == "headwise"
        return replace(
            self,
            budgets=room,
            by_query_head=by_query_head,
            decode_budgets=(most,) * model.n_slots if decodes else None,
            budget=self.budget or PROFILE_BUDGET,
            source=UNKNOWN,
            prompts=0,
            max_past=0,
            max_loss=None,
            budget_table=None,
            profile=None,
        )

    def decoding_densely(self) -> HeadwiseConfig:
        return replace(
            self,
            decode_attention="dense",
            decode_budgets=None,
            decode_from=DECODE_FROM,
            decode_until=None,
        )

    def decoding_from(self, n_tokens: int) -> HeadwiseConfig:
        most = self.found.decode_limit if self.found else None
        return replace(self, decode_from=n_tokens, decode_until=most)

    def decode_rows(self, n_tokens: int) -> Sequence[float] | None:
        return count_decode_rows(self, n_tokens)

    @property
    def may_round_products(self) -> bool:
        table = self.found.table if self.found else None
        return table is not None and table.may_round_products

    @property
    def chooses_in_decode(self) -> bool:
        return self.decode_attention == "headwise"

    @property
    def leaves_decode_open(self) -> bool:
        return self.decode_attention == "auto"

    def holding(self, saved: Mapping[str, Any]) -> HeadwiseConfig:
        held = fields_held(self, saved)
        return replace(self, **held) if held else self

    def fits(self, model: AttentionModel) -> bool:
        if self.by_query_head and not model.splits_groups:
            return False
        n_sets = count_sets(model, by_query_head=self.by_query_head)
        fits = self.budgets is None or len(self.budgets) == n_sets
        return fits and (self.decode_budgets is None or len(self.decode_budgets) == model.n_slots)

    def resolved(self, model: AttentionModel) -> HeadwiseConfig:
        chosen = self.choose_budgets(model)
        return replace(
            self,
            budgets=chosen.per_head,
            by_query_head=chosen.by_query_head,
            budget=chosen.mean,
            source=chosen.source,
            prompts=chosen.prompts,
            decode_attention=self._decode(model, chosen),
            decode_budgets=self._decode_budgets(model, chosen, chosen),
            max_past=self._max_past(chosen),
            max_loss=None,
            budget_table=None,
            profile=None,
            is_shown=chosen.is_shown(chosen.mean),
            found=chosen,
        )

    def report(self, model: AttentionModel, n_tokens: int | None = None) -> dict[str, Any]:
        chosen = self.choose_budgets(model)
        is_headwise = self._decode(model, chosen) == "headwise"
        decode = report_decode(self, n_tokens) if is_headwise else {}
        is_held = self.source in (HELD, HELD_PROFILE) and not self.max_past
        holds_all = is_held and set(chosen.per_head) == {None}
        if chosen.reads_all or holds_all:
            decode = decode if self.decode_budgets else {}
            table = HELD_DENSE if holds_all else chosen.source
            return {"algorithm": self.algorithm, "table": table, **decode}
        return {
            "algorithm": self.algorithm,
            "budget": chosen.mean,
            "table": chosen.source,
            "heads": "query" if chosen.by_query_head else "KV",
            "full_heads": chosen.per_head.count(None),
            "local": self.local,
            "sinks": self.sinks,
            "decay": self.decay,
            "landmark_size": self.landmark_size,
            "landmark_spread": self.landmark_spread,
            "max_past": self.max_past,
            "tail": self.tail,
            **decode,
        }

    def to_dict(self) -> dict[str, Any]:
        values = SparseAttentionConfig.to_dict(replace(self, found=None))  # it need not be copied
        move_decode(values)
        if not self.by_query_head:
            del values["by_query_head"]
        return values
