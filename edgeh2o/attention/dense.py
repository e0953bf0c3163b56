"""Full attention: every token reads the whole past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import AttentionModel, SparseAttentionConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy


@register_sparse_attention("dense")
@dataclass(frozen=True, slots=True)
class DenseConfig(SparseAttentionConfig):
    """No sparsity but the model's own; chunks only bound the working memory."""

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        return _core.dense_policy()

    def report(self, model: AttentionModel, n_tokens: int | None = None) -> dict[str, Any]:
        top_k = model.index_top_k
        return {**self.to_dict(), **({"indexer_top_k": top_k} if top_k else {})}
