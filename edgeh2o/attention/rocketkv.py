"""RocketKV (Behnam et al. 2025, arXiv 2502.14051): two choices for generated tokens.

Prompts are read dense. At the end of a prompt every KV head keeps the rows that its last queries
look at, and their neighbours; a generated token reads those pages of them that its largest channels
ask for, and all that was generated. The rows stay in the cache: a later prompt begins with all.
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


@register_sparse_attention("rocketkv")
@dataclass(frozen=True, slots=True, kw_only=True)
class RocketKvConfig(SparseAttentionConfig):
    """The settings of both choices; the defaults are those of TensorRT-LLM.

    Raises UsageError for values out of range.
    """

    main_settings: ClassVar[tuple[str, ...]] = ("prompt_budget", "topk")

    prompt_budget: int = option(
        2048, "--rocketkv-prompt-budget", help="tokens of the prompt that a KV head keeps"
    )
    window: int = option(
        32, "--rocketkv-window", help="last tokens of the prompt, which choose them and are kept"
    )
    kernel: int = option(
        63, "--rocketkv-kernel", help="tokens that share the largest vote among them, odd"
    )
    page_size: int = option(4, "--rocketkv-page-size", help="tokens of a page")
    topk: int = option(64, "--rocketkv-topk", help="pages that a generated token reads")
    topr: int = option(
        128, "--rocketkv-topr", help="channels of a head that pages are chosen by, as far as it has"
    )

    def __post_init__(self) -> None:
        for name in ("window", "kernel", "page_size", "topk", "topr"):
            check_int(self, name, 1)
        check_int(self, "prompt_budget", 2)
        if self.window >= self.prompt_budget:
            raise UsageError(
                f"window (--rocketkv-window) must be below the prompt budget of "
                f"{self.prompt_budget}, got {self.window}"
            )
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel (--rocketkv-kernel) must be odd, got {self.kernel}")

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        return _core.rocketkv_policy(
            prompt_budget=self.prompt_budget,
            window=self.window,
            kernel=self.kernel,
            page_size=self.page_size,
            topk=self.topk,
            topr=self.topr,
        )

    @property
    def chooses_in_decode(self) -> bool:
        return True

    def decoding_densely(self) -> SparseAttentionConfig:
        return DenseConfig()
