"""Chunked heavy-hitter attention (H2O, Zhang et al. 2023, arXiv 2306.14048).

A chunk of the prompt reads itself and a memory set per KV head: the ``local`` tokens before it, and
the ``heavy`` tokens that received most attention so far.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..errors import UsageError
from ..option_fields import check_flag, check_int, check_real, option
from .base import AttentionModel, SparseAttentionConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy

SCORES = ("sum", "mean", "lift", "window")


@register_sparse_attention("h2o")
@dataclass(frozen=True, slots=True, kw_only=True)
class H2OConfig(SparseAttentionConfig):
    """Tokens of the memory set and the score that chooses them.

    ``local`` and ``heavy`` both 0 is full attention. Raises UsageError for a value out of range.
    """

    main_settings: ClassVar[tuple[str, ...]] = ("local", "heavy")

    local: int = option(
        256, "--h2o-local", help="tokens just before a chunk that the chunk always reads"
    )
    heavy: int = option(
        256, "--h2o-heavy", help="earlier tokens with most attention that a chunk reads"
    )
    sinks: int = option(
        0, "--h2o-sinks", help="first tokens of the prompt that every chunk reads as well"
    )
    score: str = option(
        "sum",
        "--h2o-score",
        help="what makes a heavy hitter: the sum of its attention weights, their mean per query "
        "that saw it, that mean relative to even attention (lift), or the sum over the last "
        "queries of the chunk before (window)",
        choices=SCORES,
    )
    window: int = option(64, "--h2o-window", help="queries that the score 'window' looks at")
    decay: float = option(1.0, "--h2o-decay", help="factor of the old scores at every chunk")
    by_values: bool = option(
        False, "--h2o-by-values", help="multiply scores by the norms of the value vectors"
    )
    tail: int = option(
        0,
        "--h2o-tail",
        help="last tokens of the prompt that read everything, as far back as its last logical "
        "batch begins",
    )

    def __post_init__(self) -> None:
        for name in ("local", "heavy", "sinks", "tail"):
            check_int(self, name, 0)
        check_int(self, "window", 1)
        check_flag(self, "by_values")
        check_real(
            self, "decay", "in [0, 1]", lambda value: 0 <= value <= 1, "use 1 to forget nothing"
        )
        if self.score not in SCORES:
            raise UsageError(
                f"score (--h2o-score) must be one of {', '.join(SCORES)}, got {self.score!r}"
            )

    def clamped(self, chunk_size: int) -> H2OConfig:
        """``local + heavy`` brought below ``chunk_size`` in proportion, with a warning."""
        total = self.local + self.heavy
        if total < chunk_size:
            return self
        local = self.local * (chunk_size - 1) // total
        clamped = replace(self, local=local, heavy=chunk_size - 1 - local if self.heavy else 0)
        warnings.warn(
            f"local + heavy ({self.local} + {self.heavy}) must stay below the chunk size "
            f"{chunk_size}; using {clamped.local} + {clamped.heavy}",
            stacklevel=2,
        )
        return clamped

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        if self.local + self.heavy == 0:
            return _core.dense_policy()
        return _core.h2o_policy(
            self.local,
            self.heavy,
            sinks=self.sinks,
            score=self.score,
            window=self.window,
            decay=self.decay,
            by_values=self.by_values,
            tail=self.tail,
        )
