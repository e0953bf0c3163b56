"""Byte-level BPE (``tokenizer.ggml.model`` = "gpt2"); the library ``tokenizers`` finds the words.

Every byte of the UTF-8 text is written as one printable character; words made of these characters
are built up by merging the pair of lowest rank, until no pair is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import After, Tokenizer
from .bpe import build_pair_merger, read_merges
from .pre_tokenizers import cut_text, find_pre_tokenizer
from .vocabulary import read_vocabulary


def _list_byte_characters() -> list[str]:
    """The character that stands for each byte, as GPT-2's encoder assigns them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# Of RoBERTa's kind: a pair of texts has a separator unless the file says otherwise.
_WITH_SEPARATOR = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
_BYTE_CHARACTERS = _list_byte_characters()
_BYTE_OF = {character: bytes([byte]) for byte, character in enumerate(_BYTE_CHARACTERS)}


def byte_characters() -> list[str]:
    """The characters that stand for the bytes 0 to 255."""
    return list(_BYTE_CHARACTERS)


def to_byte_characters(data: bytes) -> str:
    """``data`` as the vocabulary writes it, one printable character per byte."""
    return "".join(map(_BYTE_CHARACTERS.__getitem__, data))


def spell_byte_characters(text: str) -> bytes:
    """The bytes that ``text`` stands for; other characters stand for themselves."""
    return b"".join(_BYTE_OF.get(c) or c.encode("utf-8") for c in text)


class ByteBpeTokenizer(Tokenizer):
    """Byte-level BPE. Text becomes the same ids in one piece or in pieces cut at blanks.

    ``rule`` says how text is cut into words.
    """

    def __init__(self, metadata: Mapping[str, object], *, pre_name: str) -> None:
        """Raises ``FormatError`` for a malformed vocabulary or an unknown ``pre_name``."""
        rule = find_pre_tokenizer(pre_name)
        super().__init__(
            read_vocabulary(metadata),
            metadata,
            model_name="gpt2",
            pre_name=rule.name,
            default_add_bos=rule.add_bos,
            default_add_sep=rule.name in _WITH_SEPARATOR,
        )
        self.rule = rule
        self._pre_tokenizer = rule.build()
        self._merger = build_pair_merger(
            self.vocabulary, read_merges(metadata), ignore_merges=rule.ignore_merges
        )

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        find_words = self._pre_tokenizer.pre_tokenize_str
        ids: list[int] = []
        for piece in cut_text(text, cut_point=self.rule.cut_point):
            ids += self._merger.encode([word for word, _ in find_words(piece)])
        return ids

    def _spell(self, text: str) -> bytes:
        return spell_byte_characters(text)
