"""Full attention: every token reads the whole past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import AttentionModel, SparseAttentionConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy


@register_sparse_attention("dense")
@dataclass(frozen=True, slots=True)
class DenseConfig(SparseAttentionConfig):
    """No sparsity; chunks only bound the working memory."""

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        return _core.dense_policy()
