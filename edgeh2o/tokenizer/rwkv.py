"""RWKV World (``tokenizer.ggml.model`` = "rwkv"): the longest token that a text goes on with.

Tokens are bytes, written as Python writes them. Compared with llama.cpp, text can not become a
control, unknown or unused token: only ``parse_special`` makes those from text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import FormatError
from .base import After, Tokenizer
from .vocabulary import TokenType, read_vocabulary

# What files that do not name these tokens mean.
_DEFAULT_IDS = {"bos": 0, "eos": 0}
_PIECES = frozenset((TokenType.NORMAL, TokenType.USER_DEFINED))
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def unescape(text: str) -> bytes:
    r"""The bytes of a token: of ``\t``, ``\n``, ``\r``, ``\x1f``, and what else is behind ``\``."""

    def of(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        if len(escaped) == 3:
            return bytes([int(escaped[1:], 16)])
        return _LETTERS.get(escaped, escaped)

    data = text.encode("utf-8")
    return _ESCAPE.sub(of, data) if b"\\" in data else data


class RwkvTokenizer(Tokenizer):
    """A trie of bytes, gone down as far as it goes."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        vocabulary = read_vocabulary(metadata, default_ids=_DEFAULT_IDS)
        super().__init__(
            vocabulary, metadata, model_name="rwkv", pre_name="default", default_add_bos=False
        )

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Of every piece its id; the last one of several counts."""
        rows = zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)
        ids = {
            unescape(text): token_id
            for token_id, (text, kind) in enumerate(rows)
            if kind in _PIECES and text
        }
        missing = [byte for byte in range(256) if bytes([byte]) not in ids]
        if missing:
            raise FormatError(
                f"the vocabulary has no token of the byte 0x{missing[0]:02X}, as those of RWKV do; "
                "convert the model again"
            )
        return ids

    @cached_property
    def _lengths(self) -> dict[bytes, tuple[int, ...]]:
        """How long pieces are that begin with two bytes, the longest first."""
        found: dict[bytes, set[int]] = {}
        for piece in self._ids:
            if len(piece) > 1:
                found.setdefault(piece[:2], set()).add(len(piece))
        return {first: tuple(sorted(lengths, reverse=True)) for first, lengths in found.items()}

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        data, ids, lengths = text.encode("utf-8"), self._ids, self._lengths
        found: list[int] = []
        at = 0
        while at < len(data):
            for length in (*lengths.get(data[at : at + 2], ()), 1):
                token_id = ids.get(data[at : at + length])
                if token_id is not None and at + length <= len(data):
                    break
            assert token_id is not None  # every byte has one
            found.append(token_id)
            at += length
        return found

    def _spell(self, text: str) -> bytes:
        return unescape(text)
