"""WordPiece (``tokenizer.ggml.model`` = "bert"): words, and the longest pieces of each.

Text is cleaned as BERT does it: control characters go, accents and capitals too unless the file
says otherwise (``tokenizer.ggml.normalizer.lowercase``, ``.strip_accents``), and punctuation and
Chinese characters are words of their own. A word that pieces do not make up is the unknown token.
Every text gets a token before it (``[CLS]``) and one behind it (``[SEP]``). Compared with
llama.cpp, text can not become a control or unused token: only ``parse_special`` makes those from
text; and Hangul keeps all its parts where accents go, as models were trained.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import FormatError
from .base import After, Tokenizer
from .vocabulary import BLANK, TokenType, read_flag, read_token_id, read_vocabulary, spell_piece

# What files that do not name these tokens mean.
_DEFAULT_IDS = {"bos": 101}
_UNKNOWN_ID, _SEPARATOR_ID = 100, 102
_SEPARATOR = "seperator"  # as GGUF spells it
_PIECES = frozenset((TokenType.NORMAL, TokenType.USER_DEFINED))
_WHITESPACE = frozenset(
    map(
        chr,
        (
            *range(0x09, 0x0E),
            *range(0x2000, 0x200B),
            *(0x20, 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
        ),
    )
)
_CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
# Words whose pieces are kept, so that each is looked up once.
_MOST_WORDS = 1 << 16


class _Cleaned(dict[int, str]):
    """What a character becomes, for ``str.translate``: blanks around what is a word of its own."""

    def __init__(self, *, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents

    def __missing__(self, code: int) -> str:
        character = chr(code)
        parts = unicodedata.normalize("NFD", character) if self._strip_accents else character
        self[code] = cleaned = "".join(map(self._clean, parts))
        return cleaned

    def _clean(self, character: str) -> str:
        if character in _WHITESPACE:
            return " "
        code, kind = ord(character), unicodedata.category(character)
        is_control = kind in ("Cc", "Cf", "Co", "Cs") or code in (0, 0xFFFD)
        if is_control or (self._strip_accents and kind[0] == "M"):
            return ""
        # One character for one, as the table of Unicode has it.
        shown = character.lower()[0] if self._lowercase else character
        is_alone = kind[0] == "P" or (code < 0x7F and kind[0] == "S")
        if is_alone or any(first <= code <= last for first, last in _CHINESE):
            return f" {shown} "
        return shown


class WordPieceTokenizer(Tokenizer):
    """Greedy pieces of cleaned words."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        vocabulary = read_vocabulary(metadata, default_ids=_DEFAULT_IDS)
        super().__init__(
            vocabulary,
            metadata,
            model_name="bert",
            pre_name="default",
            default_add_bos=True,
            space_prefix=True,
            default_sep=_SEPARATOR_ID,
            default_add_sep=True,
        )
        n = len(vocabulary)
        unknown_id = read_token_id(metadata, "unknown", n, default=_UNKNOWN_ID)
        for name, token_id in (
            ("bos", self.bos_id),
            ("unknown", unknown_id),
            (_SEPARATOR, self.sep_id),
        ):
            if token_id is None:
                raise FormatError(
                    f"tokenizer.ggml.{name}_token_id names no token of the vocabulary, which texts "
                    "of BERT need; convert the model again with its vocabulary"
                )
        assert unknown_id is not None and self.sep_id is not None
        self._unknown_id = unknown_id
        # Around every text, whatever the file says; it counts between a pair.
        self._ends_first = read_flag(metadata, "tokenizer.ggml.add_eos_token", default=False)
        self.add_bos = self.add_eos = True
        self.eos_id = self.sep_id
        lowercase = read_flag(metadata, "tokenizer.ggml.normalizer.lowercase", default=True)
        strip_accents = read_flag(
            metadata, "tokenizer.ggml.normalizer.strip_accents", default=lowercase
        )
        self._cleaned = _Cleaned(lowercase=lowercase, strip_accents=strip_accents)
        self._words: dict[str, tuple[int, ...]] = {}

    def count_at_least(self, text: str) -> int:
        """0: blanks are no tokens, and a word of any length may be one."""
        return 0

    @cached_property
    def _ids(self) -> dict[str, int]:
        rows = zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)
        return {text: i for i, (text, kind) in enumerate(rows) if kind in _PIECES}

    @cached_property
    def _lengths(self) -> dict[str, tuple[int, ...]]:
        """How long pieces are that begin with two characters, or are one, the longest first."""
        found: dict[str, set[int]] = {}
        for piece in self._ids:
            found.setdefault(piece[:2], set()).add(len(piece))
        return {first: tuple(sorted(lengths, reverse=True)) for first, lengths in found.items()}

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        ids: list[int] = []
        for word in text.translate(self._cleaned).split(" "):
            if not word:
                continue
            pieces = self._words.get(word)
            if pieces is None:
                pieces = tuple(self._find_pieces(BLANK + word)) or (self._unknown_id,)
                if len(self._words) < _MOST_WORDS:
                    self._words[word] = pieces
            ids += pieces
        return ids

    def _find_pieces(self, word: str) -> list[int]:
        """Those of a word, [] if there is a place that none begins at."""
        found: list[int] = []
        at, ids, lengths = 0, self._ids, self._lengths
        while at < len(word):
            start = word[at : at + 2]
            for length in (*lengths.get(start, ()), *(lengths.get(start[0], ()))):
                token_id = ids.get(word[at : at + length])
                if token_id is not None and at + length <= len(word):
                    break
            else:
                return []
            assert token_id is not None
            found.append(token_id)
            at += length
        return found

    def _spell(self, text: str) -> bytes:
        return spell_piece(text)
