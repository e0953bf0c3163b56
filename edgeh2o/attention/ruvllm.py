"""The rule of ruvllm_sparse_attention: what a token reads goes by distance alone.

A window before it, the first tokens, tokens at distances 1, 2, 4, ..., and landmarks, the mean key
and mean value of blocks of tokens: the last two complete blocks and those 1, 2, 4, ... before the
last. Prompts and generated tokens alike read O(log n) rows each; nothing is found by its content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ..option_fields import check_flag, check_int, option
from .base import AttentionModel, SparseAttentionConfig
from .registry import register_sparse_attention

if TYPE_CHECKING:
    from .._core import SparsePolicy


@register_sparse_attention("ruvllm")
@dataclass(frozen=True, slots=True, kw_only=True)
class RuvllmConfig(SparseAttentionConfig):
    """The published defaults. A chunk of one token (``chunk_size=1``) is the rule as published.

    A longer chunk reads what its first token would, and itself, which is faster. Raises UsageError
    for values out of range.
    """

    main_settings: ClassVar[tuple[str, ...]] = ("window", "block_size")
    preferred_chunk_size: ClassVar[int] = 1

    window: int = option(128, "--ruvllm-window", help="tokens before a token that it reads")
    block_size: int = option(64, "--ruvllm-block-size", help="tokens of a landmark")
    globals: int = option(1, "--ruvllm-globals", help="first tokens, which all tokens read")
    no_strides: bool = option(
        False,
        "--ruvllm-no-strides",
        help="leave out tokens and landmarks at distances 1, 2, 4, ...",
    )
    no_landmarks: bool = option(
        False, "--ruvllm-no-landmarks", help="leave out the means of blocks of tokens"
    )
    dense_decode: bool = option(
        False, "--ruvllm-dense-decode", help="generated tokens read everything"
    )

    def __post_init__(self) -> None:
        check_int(self, "window", 0)
        check_int(self, "block_size", 1)
        check_int(self, "globals", 0)
        for name in ("no_strides", "no_landmarks", "dense_decode"):
            check_flag(self, name)

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        from .. import _core

        return _core.ruvllm_policy(
            window=self.window,
            block_size=self.block_size,
            globals=self.globals,
            strides=not self.no_strides,
            landmarks=not self.no_landmarks,
            in_decode=not self.dense_decode,
        )

    @property
    def chooses_in_decode(self) -> bool:
        return not self.dense_decode

    def decoding_densely(self) -> SparseAttentionConfig:
        return replace(self, dense_decode=True)
