"""Quest (Tang et al. 2024, arXiv 2406.10774): a generated token reads the pages it asks for.

Prompts are read dense. A page is known by the elementwise bounds of its keys, which bound every
logit; a generated token reads those pages of the prompt whose bounds are the largest, and all that
was generated. The query heads of a KV head share the pages: the largest bound of the group counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import UsageError
from ..option_fields import check_int, option
from .base import AttentionModel, SparseAttentionConfig
from .dense import DenseConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy


@register_sparse_attention("quest")
@dataclass(frozen=True, slots=True, kw_only=True)
class QuestConfig(SparseAttentionConfig):
    """Tokens that a generated token reads of the prompt, in pages.

    Raises UsageError for values out of range.
    """

    main_settings: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: int = option(
        2048, "--quest-tokens", help="earlier tokens that a generated token reads, in pages"
    )
    page_size: int = option(16, "--quest-page-size", help="tokens of a page")
    dense_layers: int = option(
        2, "--quest-dense-layers", help="first layers, whose generated tokens read everything"
    )

    def __post_init__(self) -> None:
        check_int(self, "tokens", 1)
        check_int(self, "page_size", 1)
        check_int(self, "dense_layers", 0)
        if self.page_size > self.tokens:
            raise UsageError(
                f"a page of {self.page_size} tokens (--quest-page-size) does not fit into the "
                f"{self.tokens} that a generated token reads (--quest-tokens)"
            )

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        return _core.quest_policy(
            page_size=self.page_size, tokens=self.tokens, dense_layers=self.dense_layers
        )

    @property
    def chooses_in_decode(self) -> bool:
        return True

    def decoding_densely(self) -> SparseAttentionConfig:
        return DenseConfig()
