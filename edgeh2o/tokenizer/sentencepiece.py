"""SentencePiece BPE with byte fallback (``tokenizer.ggml.model`` = "llama").

Blanks are written as U+2581; neighbours merge by the score of the piece they make; a character
that is no piece becomes its UTF-8 bytes. Compared with llama.cpp, text can not grow into a control,
unknown or byte token by merging: only ``parse_special`` makes those from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import FormatError
from .base import After, Tokenizer
from .vocabulary import (
    BLANK,
    TokenType,
    Vocabulary,
    read_flag,
    read_scores,
    read_token_id,
    read_vocabulary,
    spell_piece,
)

if TYPE_CHECKING:
    from ._spm import PieceMerger

# What files that do not name these tokens mean, as long as the vocabulary is that large.
_DEFAULT_IDS = {"bos": 1, "eos": 2}
_NOT_MERGED = frozenset((TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE))


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece BPE. A blank goes before text at the start and after special tokens, if the
    model wants that (``tokenizer.ggml.add_space_prefix``, true by default)."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        vocabulary = read_vocabulary(metadata, default_ids=_DEFAULT_IDS)
        super().__init__(
            vocabulary,
            metadata,
            model_name="llama",
            pre_name="default",
            default_add_bos=True,
            space_prefix=read_flag(metadata, "tokenizer.ggml.add_space_prefix", default=True),
        )
        unknown_id = read_token_id(metadata, "unknown", len(vocabulary))
        if unknown_id is None and TokenType.UNKNOWN in vocabulary.types:
            unknown_id = vocabulary.types.index(TokenType.UNKNOWN)
        self._scores = read_scores(metadata, len(vocabulary))
        # Of the bytes of what is no piece.
        self._byte_ids = find_byte_ids(vocabulary, unknown_id)

    @cached_property
    def _merger(self) -> PieceMerger:
        from ._spm import PieceMerger

        vocabulary = self._vocabulary
        pieces = [
            b"" if kind in _NOT_MERGED else text.encode("utf-8")
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        ]
        return PieceMerger(pieces, self._scores, self._byte_ids)

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        text = " " + text if self.space_prefix and after != "text" else text
        return self._merger.encode(text.replace(" ", BLANK).encode("utf-8"))

    def _spell(self, text: str) -> bytes:
        return spell_piece(text)


def find_byte_ids(vocabulary: Vocabulary, unknown_id: int | None) -> list[int]:
    """The id of each byte: its byte token, its character, or the unknown token."""
    byte_ids = []
    for byte in range(256):
        token_id = vocabulary.ids.get(f"<0x{byte:02X}>")
        if token_id is None and byte < 128:
            token_id = vocabulary.ids.get(chr(byte))
        if token_id is None:
            token_id = unknown_id
        if token_id is None:
            raise FormatError(
                f"tokenizer.ggml.tokens has no byte token <0x{byte:02X}>, and "
                "tokenizer.ggml.unknown_token_id names no token to take its place; "
                "convert the model again with its vocabulary"
            )
        byte_ids.append(token_id)
    return byte_ids
