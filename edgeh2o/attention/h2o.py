"""Chunked heavy-hitter attention (H2O, Zhang et al. 2023, arXiv 2306.14048).

A chunk of the prompt reads itself and a memory set per KV head: the ``local`` tokens before it, and
the ``heavy`` tokens that received most attention so far.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING

from ..config import MAX_CONTEXT, option
from ..errors import UsageError
from .base import AttentionModel, SparseAttentionConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy


@register_sparse_attention("h2o")
@dataclass(frozen=True, slots=True, kw_only=True)
class H2OConfig(SparseAttentionConfig):
    """Tokens of the memory set; both 0 is full attention.

    Raises UsageError unless both are integers >= 0.
    """

    local: int = option(
        256, "--h2o-local", help="tokens just before a chunk that the chunk always reads"
    )
    heavy: int = option(
        256, "--h2o-heavy", help="earlier tokens with most attention that a chunk reads"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            is_int = isinstance(value, Integral) and not isinstance(value, bool)
            if not is_int or not 0 <= value <= MAX_CONTEXT:
                raise UsageError(
                    f"{item.name} ({item.metadata['flags'][0]}) must be an integer >= 0, "
                    f"got {value!r}"
                )

    def clamped(self, chunk_size: int) -> H2OConfig:
        """``local + heavy`` brought below ``chunk_size`` in proportion, with a warning."""
        total = self.local + self.heavy
        if total == 0 or total < chunk_size:
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
        return _core.h2o_policy(self.local, self.heavy)
