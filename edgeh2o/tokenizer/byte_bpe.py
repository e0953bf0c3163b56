"""Byte-level BPE (``tokenizer.ggml.model`` = "gpt2"), on the Hugging Face ``tokenizers`` library.

Every byte of the UTF-8 text is written as one printable character; words made of these characters
are built up by merging the pair of lowest rank, until no pair is left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer.base import Tokenizer
from edgeh2o.tokenizer.pre_tokenizers import PreTokenizer, cut_text, find_pre_tokenizer
from edgeh2o.tokenizer.special_tokens import Fragment
from edgeh2o.tokenizer.vocabulary import (
    TokenType,
    Vocabulary,
    parse_byte_token,
    read_string_list,
    read_vocabulary,
)

if TYPE_CHECKING:
    import tokenizers

_logger = logging.getLogger(__name__)


def _list_byte_characters() -> list[str]:
    """Return the character that stands for each byte, as GPT-2's encoder assigns them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_CHARACTERS = _list_byte_characters()
_BYTE_OF = {character: bytes([byte]) for byte, character in enumerate(_BYTE_CHARACTERS)}


def to_byte_characters(data: bytes) -> str:
    """Return ``data`` as the vocabulary writes it, one printable character per byte."""
    return "".join(map(_BYTE_CHARACTERS.__getitem__, data))


class ByteBpeTokenizer(Tokenizer):
    """Byte-level BPE. Text becomes the same ids in one piece or in pieces cut at blanks."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        metadata: Mapping[str, object],
        *,
        merges: Sequence[str],
        rule: PreTokenizer,
    ) -> None:
        """``merges`` are "left right" pairs of token texts, the first merged first."""
        super().__init__(
            vocabulary,
            metadata,
            model_name="gpt2",
            pre_name=rule.name,
            default_add_bos=rule.add_bos,
        )
        self._cut_point = rule.cut_point
        # Bytes without a token vanish. They still part their neighbours, so they get an id of
        # their own that is dropped at the end.
        self._dropped_id: int | None = None
        ids: Mapping[str, int] = vocabulary.ids
        if any(character not in ids for character in _BYTE_CHARACTERS):
            self._dropped_id = len(vocabulary)
        self._pipeline = _build_pipeline(ids, merges, rule, dropped_id=self._dropped_id)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> ByteBpeTokenizer:
        """Build from GGUF metadata; raises ``FormatError`` for a malformed vocabulary."""
        rule = find_pre_tokenizer(_read_pre_name(metadata))
        vocabulary = read_vocabulary(metadata)
        merges = read_string_list(metadata, "tokenizer.ggml.merges")
        return cls(vocabulary, metadata, merges=merges, rule=rule)

    def _encode_fragments(self, fragments: Sequence[Fragment]) -> list[int]:
        encode = self._pipeline.encode
        ids: list[int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
                continue
            for piece in cut_text(fragment, cut_point=self._cut_point):
                ids += encode(piece, add_special_tokens=False).ids
        if self._dropped_id is not None and self._dropped_id in ids:
            return [token_id for token_id in ids if token_id != self._dropped_id]
        return ids

    def _spell(self, token_id: int, kind: int) -> bytes:
        text = self._vocabulary.tokens[token_id]
        if kind == TokenType.NORMAL:
            return b"".join(_BYTE_OF.get(c) or c.encode("utf-8") for c in text)
        if kind == TokenType.BYTE:
            return bytes([parse_byte_token(text, token_id)])
        if kind in (TokenType.UNUSED, TokenType.UNDEFINED):
            return b""
        return text.encode("utf-8")


def _read_pre_name(metadata: Mapping[str, object]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(name, str):
        raise FormatError(f"tokenizer.ggml.pre must be a string, not {type(name).__name__}")
    if not name:
        _logger.warning(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre); using 'default', "
            "which may give poorer answers. Convert the model again with a newer converter"
        )
        return "default"
    return name


def _build_pipeline(
    ids: Mapping[str, int],
    merges: Sequence[str],
    rule: PreTokenizer,
    *,
    dropped_id: int | None,
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    # The library panics over a merge that makes a text longer than any of the vocabulary.
    longest = max(len(text.encode("utf-8")) for text in ids)
    if len(set(merges)) != len(merges) or any(
        len(merge.encode("utf-8", "surrogatepass")) - 1 > longest for merge in merges
    ):
        _check_merges(ids, merges)
    vocab = dict(ids)
    unknown = None
    if dropped_id is not None:
        unknown = "\0"
        while unknown in vocab:
            unknown += "\0"
        vocab[unknown] = dropped_id
    # BPE refuses what is not a pair of known texts; the checks then say which entry it is.
    pairs = cast("list[tuple[str, str]]", [tuple(merge.split(" ")) for merge in merges])
    try:
        bpe = models.BPE(vocab, pairs, unk_token=unknown, ignore_merges=rule.ignore_merges)
    except Exception as error:
        _check_merges(ids, merges)
        raise FormatError(f"the vocabulary cannot be used: {error}") from error
    pipeline = Tokenizer(bpe)
    pipeline.pre_tokenizer = rule.build()
    return pipeline


def _check_merges(ids: Mapping[str, int], merges: Sequence[str]) -> None:
    """Raise ``FormatError`` that names the first malformed merge, if there is one."""
    key = "tokenizer.ggml.merges"
    first: dict[str, int] = {}
    for i, merge in enumerate(merges):
        shown = repr(merge[:80])
        parts = merge.split(" ")
        if len(parts) != 2 or not all(parts):
            raise FormatError(f"{key}[{i}] is {shown}; a merge is two token texts and one space")
        for text in (*parts, "".join(parts)):
            if text not in ids:
                raise FormatError(f"{key}[{i}] is {shown}, but the vocabulary has no {text[:40]!r}")
        if first.setdefault(merge, i) != i:
            raise FormatError(f"{key}[{i}] repeats entry {first[merge]}: {shown}")
