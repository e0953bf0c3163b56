"""What every sparse attention algorithm offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

    from .._core import SparsePolicy
    from .budget_table import BudgetTable


class AttentionModel(Protocol):
    """What an algorithm may need to know of a model; ``ModelConfig`` has it."""

    @property
    def n_layers(self) -> int: ...

    @property
    def n_kv_heads(self) -> int:
        """The largest number of a layer."""

    @property
    def n_heads(self) -> int:
        """The largest number of a layer."""

    @property
    def n_slots(self) -> int:
        """KV heads of all layers."""

    @property
    def splits_groups(self) -> bool:
        """Whether query heads that share a KV head may have memory sets of their own."""

    @property
    def decodes_by_rule(self) -> bool:
        """Whether generated tokens may read a part of what is cached."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def index_top_k(self) -> int:
        """Tokens that an indexer of the model's own lets a query read; 0: it has none."""

    @property
    def has_distance_bias(self) -> bool:
        """Whether logits of attention lose something by the distance of query and key (ALiBi)."""

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have a state in the place of keys and values, or beside them."""

    @property
    def has_like_layers(self) -> bool:
        """Whether layers attend alike: to keys and values of their own, in heads of one size."""


def count_sets(model: AttentionModel, *, by_query_head: bool) -> int:
    """Memory sets of a prompt: one per KV head of every layer, or one per query head."""
    return model.n_layers * model.n_heads if by_query_head else model.n_slots


def has_equal_kv_heads(model: AttentionModel) -> bool:
    """Whether every layer has as many KV heads as the others: what budget tables are for."""
    return model.n_slots == model.n_layers * model.n_kv_heads


def require_equal_kv_heads(model: AttentionModel, what: str, cure: str) -> None:
    """Raises UsageError, which says what needs it, for a model whose layers differ in KV heads."""
    if not has_equal_kv_heads(model):
        raise UsageError(
            f"{what} needs layers of equal numbers of KV heads, and those of this model differ; "
            f"{cure}"
        )


def require_measurable(model: AttentionModel, what: str) -> None:
    """Raises UsageError, which says what needs it, for a model that can have no budget table."""
    cure = "give --budget, for all heads the same; without it prompts are read dense"
    if model.is_recurrent:
        raise UsageError(
            f"{what} is for models without recurrent layers, and this one has some; {cure}"
        )
    if model.index_top_k:
        raise UsageError(
            f"{what} is for models that have no indexer of their own, and this one has: it "
            "chooses what is read without a budget table"
        )
    if model.has_distance_bias:
        raise UsageError(
            f"{what} is for models without a bias by distance (ALiBi), and this one has one: it "
            "reads everything without a budget table"
        )
    require_equal_kv_heads(model, what, cure)
    if not model.has_like_layers:
        raise UsageError(
            f"{what} is for models whose layers attend alike, and this one has attention sinks, or "
            f"layers that share keys and values or differ in the size of their heads; {cure}"
        )


@dataclass(frozen=True, slots=True)
class SparseAttentionConfig(ABC):
    """Settings of one algorithm: which earlier tokens a chunk of the prompt may read.

    Subclasses are frozen dataclasses under ``@register_sparse_attention``. Their fields become
    command line flags.
    """

    algorithm: ClassVar[str]
    # Names of the settings that a short description always gives.
    main_settings: ClassVar[tuple[str, ...]] = ()
    # Tokens per chunk that suit the algorithm, and those on a GPU if that is another number.
    preferred_chunk_size: ClassVar[int] = 1024
    gpu_chunk_size: ClassVar[int | None] = None

    @abstractmethod
    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        """A fresh policy; it holds the state of one session."""

    def clamped(self, chunk_size: int) -> Self:
        """These settings, reduced with a warning where they do not fit the chunk size."""
        return self

    def resolved(self, model: AttentionModel) -> Self:
        """These settings, with what ``make_policy`` would look up for the model filled in.

        A run looks it up once, and a session file holds it: it may be another the next time.
        """
        return self

    def default_max_error(self, resolved: SparseAttentionConfig) -> float | None:
        """Percent that the attention may be wrong by, as ``PrefillConfig.max_error`` says it.

        ``resolved`` is what ``resolved`` gave. None for settings that promise nothing.
        """
        return None

    @property
    def mean_budget(self) -> int | None:
        """Keys per head in what ``resolved`` gave, mean over the heads; None for no limit."""
        return None

    def naming_budget(self, resolved: SparseAttentionConfig) -> SparseAttentionConfig:
        """These settings with the ``mean_budget`` that was chosen, to be described."""
        return self

    def budget_for(self, resolved: SparseAttentionConfig, n_tokens: int) -> int | None:
        """Keys per head that a prompt so long is to have, mean over the heads.

        ``resolved`` is what ``resolved`` gave. None for settings whose prompts are read alike,
        however long.
        """
        return None

    def with_budget(
        self, resolved: SparseAttentionConfig, model: AttentionModel, budget: int
    ) -> SparseAttentionConfig:
        """What ``resolved`` gave, with what ``budget_for`` says."""
        return resolved

    def expected_keys(
        self, resolved: SparseAttentionConfig, n_tokens: int, reads_past: Sequence[bool]
    ) -> float | None:
        """Keys that a query of a prompt so long reads, mean over queries and heads.

        Of the layers that ``reads_past`` [n_layers] names; others read the same anyhow.
        ``resolved`` is what ``resolved`` gave. What a guard will read besides is estimated. None
        for settings that were chosen by hand, or that leave no choice: prompts are read by them.
        """
        return None

    @property
    def is_taught(self) -> bool:
        """Whether what ``resolved`` filled in was learnt by prompts, or by a calibration here.

        And not by one whose losses were compared with the errors that a guard measures.
        """
        return False

    @property
    def profiled_prompts(self) -> int | None:
        """Prompts that what ``resolved`` filled in is learnt from, if more would improve it."""
        return None

    def with_profile(self, table: BudgetTable) -> Self:
        """These settings, with what the profile says in the place of what was known before."""
        return self

    def reading_all(self, *, saves_time: bool = False) -> Self:
        """What ``resolved`` gave, but for a prompt that is read dense.

        For its profile, or because that ``saves_time``: then it teaches nothing either.
        """
        return self

    @property
    def reads_all(self) -> bool:
        """Whether what ``resolved`` or ``reading_all`` gave reads prompts dense."""
        return False

    @property
    def is_learning(self) -> bool:
        """Whether this is what ``learning`` gave."""
        return False

    def learning(self, model: AttentionModel, context: int) -> Self | None:
        """These settings, resolved, but reading the first ``PROFILE_TOKENS`` of a prompt dense.

        What they teach then gives the budgets of the rest. None where that cannot be, in a session
        of ``context`` positions.
        """
        return None

    def decoding_densely(self) -> SparseAttentionConfig:
        """Settings that read prompts as these do, and where generated tokens read everything."""
        return self

    def decoding_from(self, n_tokens: int) -> SparseAttentionConfig:
        """The same where they do so of prompts with fewer than ``n_tokens`` alone.

        And of those that are longer than what was measured, if that is known.
        """
        return self

    def decode_rows(self, n_tokens: int) -> Sequence[float] | None:
        """Cached rows that a token reads of a prompt so long, per KV head of every layer.

        By what ``resolved`` gave, whatever ``decoding_from`` says; what is read to choose them is
        counted as rows. None for settings whose cost is not known here, or that read everything.
        """
        return None

    @property
    def chooses_in_decode(self) -> bool:
        """Whether every generated token chooses what it reads, whatever the model and its length.

        An eviction would change what there is to choose from.
        """
        return False

    @property
    def may_round_products(self) -> bool:
        """Whether what ``resolved`` gave may multiply in 8 bits, if no precision is asked for."""
        return False

    @property
    def leaves_decode_open(self) -> bool:
        """Whether ``resolved`` chooses what generated tokens read, as nothing was asked for."""
        return False

    def holding(self, saved: Mapping[str, Any]) -> Self:
        """These settings with what was looked up when a session was saved, given as ``to_dict``.

        And with ``is_taught`` of what was looked up, which older files lack.
        Where the settings themselves say something else they stay as they are.
        """
        return self

    def fits(self, model: AttentionModel) -> bool:
        """Whether what ``holding`` gave can be run for the model."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """The algorithm's name and its settings as plain values, fit for JSON."""
        values = asdict(self)
        settings = {item.name: values[item.name] for item in fields(self) if is_setting(item)}
        return {"algorithm": self.algorithm, **settings}

    def report(self, model: AttentionModel, n_tokens: int | None = None) -> dict[str, Any]:
        """``to_dict`` with what ``make_policy`` makes of it for a model, for statistics.

        For a prompt of ``n_tokens``, where that makes a difference and is given.
        """
        return self.to_dict()

    def describe(self) -> str:
        """The main settings and those that differ from the default: ``h2o local 256 heavy 256``."""
        shown: dict[str, Any] = {"algorithm": self.algorithm}
        for item in fields(self):
            value = getattr(self, item.name) if is_setting(item) else None
            if value is not None and (item.name in self.main_settings or value != item.default):
                shown[item.name] = value
        return describe_settings(shown)


def is_setting(item: Field[Any]) -> bool:
    """Whether a field is a setting, not the result of a measurement."""
    return bool(item.metadata.get("is_setting", True))


def describe_settings(settings: Mapping[str, Any]) -> str:
    """The settings that ``to_dict`` gives, in one line."""
    return " ".join(
        str(value) if name == "algorithm" else f"{name} {value}" for name, value in settings.items()
    )
