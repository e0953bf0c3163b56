"""SentencePiece's unigram model (``tokenizer.ggml.model`` = "t5"): XLM-RoBERTa's vocabulary.

Text is rewritten by the table that the file has (``tokenizer.ggml.precompiled_charsmap``: forms of
characters as of NFKC, control characters, blanks), blanks are written as U+2581, and the pieces
whose scores add up to the most are taken. Characters without a piece are one unknown token, as many
of them as stand together. Compared with llama.cpp, text can not become an unused token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import FormatError
from .base import After, Tokenizer
from .vocabulary import (
    TokenType,
    read_flag,
    read_scores,
    read_token_id,
    read_vocabulary,
    spell_piece,
)

if TYPE_CHECKING:
    from ._unigram import PieceFinder, TextRewriter

CHARSMAP_KEY = "tokenizer.ggml.precompiled_charsmap"
# What files that do not name these tokens mean.
_DEFAULT_IDS = {"eos": 1}
_UNKNOWN_ID = 2
# By how much an unknown character is worse than the worst piece, as in SentencePiece.
_UNKNOWN_PENALTY = 10.0


class UnigramTokenizer(Tokenizer):
    """The best pieces of rewritten text, a blank before it if the file says so
    (``tokenizer.ggml.add_space_prefix``) or blanks are joined
    (``tokenizer.ggml.remove_extra_whitespaces``)."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        vocabulary = read_vocabulary(metadata, default_ids=_DEFAULT_IDS)
        adds_blank = read_flag(metadata, "tokenizer.ggml.add_space_prefix", default=False)
        joins_blanks = read_flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", default=False)
        super().__init__(
            vocabulary,
            metadata,
            model_name="t5",
            pre_name="default",
            default_add_bos=False,
            default_add_eos=True,
            space_prefix=adds_blank or joins_blanks,
        )
        unknown_id = read_token_id(metadata, "unknown", len(vocabulary), default=_UNKNOWN_ID)
        if unknown_id is None:
            raise FormatError(
                "tokenizer.ggml.unknown_token_id names no token of the vocabulary, which takes the "
                "place of characters without a piece; convert the model again with its vocabulary"
            )
        self._unknown_id = unknown_id
        self._scores = read_scores(metadata, len(vocabulary))
        self._rewriter = _build_rewriter(metadata, adds_blank=adds_blank, joins_blanks=joins_blanks)

    def count_at_least(self, text: str) -> int:
        """0: what is rewritten to nothing has no token, and what is unknown has one."""
        return 0

    @cached_property
    def _finder(self) -> PieceFinder:
        import numpy as np

        from ._unigram import PieceFinder

        kinds, scores = np.array(self._vocabulary.types), self._scores
        is_finite = np.isfinite(scores)
        is_normal = is_finite & (kinds == TokenType.NORMAL)
        usable = is_normal | (is_finite & (kinds == TokenType.USER_DEFINED))
        pieces = {i: self._vocabulary.tokens[i].encode() for i in np.flatnonzero(usable).tolist()}
        ids = sorted(pieces, key=pieces.__getitem__)
        # llama.cpp's: one that is user-defined is as good as can be.
        own = np.where(is_normal, scores, 0.0)[ids]
        worst = scores[is_normal].min(initial=0.0)
        return PieceFinder(
            [pieces[i] for i in ids],
            ids,
            own.tolist(),
            self._unknown_id,
            float(np.float32(worst - _UNKNOWN_PENALTY)),
        )

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        rewritten = self._rewriter.rewrite(text.encode("utf-8"), goes_on=after == "text")
        return self._finder.find(rewritten)

    def _spell(self, text: str) -> bytes:
        return spell_piece(text)


def _build_rewriter(
    metadata: Mapping[str, object], *, adds_blank: bool, joins_blanks: bool
) -> TextRewriter:
    """By the table of the file, if it has one. Raises FormatError for one that is damaged."""
    import numpy as np

    from ._unigram import TextRewriter

    value, table = metadata.get(CHARSMAP_KEY), b""
    if value is not None:
        if not isinstance(value, np.ndarray) or value.dtype.itemsize != 1 or value.ndim != 1:
            kind = getattr(value, "dtype", type(value).__name__)
            raise FormatError(f"{CHARSMAP_KEY} must be an array of bytes, not {kind}")
        table = value.tobytes()
    try:
        if value is not None and not table:
            raise ValueError("it is empty")
        return TextRewriter(table, adds_blank=adds_blank, joins_blanks=joins_blanks)
    except ValueError as error:
        raise FormatError(
            f"{CHARSMAP_KEY} is damaged: {error}; fetch the model again, or convert it again"
        ) from None
