"""What every tokenizer shares: special tokens, BOS and EOS, decoding."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ..errors import FormatError, UsageError
from .special_tokens import SpecialTokens
from .stream_decoder import StreamDecoder
from .vocabulary import TokenType, Vocabulary, parse_byte_token, read_flag, read_token_id

_logger = logging.getLogger(__name__)

# What text can name: always, and where control tokens are asked for.
_ALWAYS_MATCHED = frozenset((TokenType.USER_DEFINED,))
_MATCHED = _ALWAYS_MATCHED | {TokenType.CONTROL, TokenType.UNKNOWN}
_MATCHED_TYPES = re.compile(b"[%s]" % re.escape(bytes(sorted(_MATCHED))))
# What comes before a text: nothing, a special token, or text that it goes on from.
After = Literal["start", "token", "text"]


class Tokenizer(ABC):
    """Text to token ids and back. Immutable: one object serves any number of prompts.

    Attributes:
        model_name: value of ``tokenizer.ggml.model``.
        pre_name: value of ``tokenizer.ggml.pre``, "default" where the file has none.
        bos_id, eos_id: ids of the tokens that begin and end a text; None if there is none.
        add_bos, add_eos: whether ``encode`` adds them.
        sep_id, add_sep: the token that stands between a pair of texts, and whether one does.
        eog_ids: ids after which a generation stops.
        space_prefix: whether a text begins with a blank that ``encode`` adds and ``decode`` drops.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        metadata: Mapping[str, object],
        *,
        model_name: str,
        pre_name: str,
        default_add_bos: bool,
        default_add_eos: bool = False,
        default_sep: int | None = None,
        default_add_sep: bool = False,
        space_prefix: bool = False,
    ) -> None:
        self.model_name = model_name
        self.pre_name = pre_name
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos = _read_adding(metadata, "bos", self.bos_id, default=default_add_bos)
        self.add_eos = _read_adding(metadata, "eos", self.eos_id, default=default_add_eos)
        self.sep_id = read_token_id(metadata, "seperator", len(vocabulary), default=default_sep)
        self.add_sep = read_flag(metadata, "tokenizer.ggml.add_sep_token", default=default_add_sep)
        # Of a pair of texts, whether the first one ends with EOS before a separator.
        self._ends_first = self.add_eos
        self._vocabulary = vocabulary
        # In characters of the vocabulary; each stands for one byte of the text at least.
        self._max_token_length = max(map(len, vocabulary.tokens))
        self.space_prefix = space_prefix
        matched = _find_special_tokens(vocabulary)
        stripping = _find_stripping(metadata, matched)
        self._special = SpecialTokens(matched, strips_right=stripping)
        always = [(text, i) for text, i in matched if vocabulary.types[i] in _ALWAYS_MATCHED]
        self._always_matched = SpecialTokens(always, strips_right=stripping)

    @property
    def vocabulary(self) -> Vocabulary:
        """Token texts and types."""
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary)

    @property
    def control_texts(self) -> list[str]:
        """Texts that ``encode`` takes for tokens only if ``parse_special`` is set."""
        always = set(self._always_matched.texts)
        return [text for text in self._special.texts if text not in always]

    @property
    def bos_text(self) -> str:
        """Text of the token that begins a text, "" if there is none."""
        return "" if self.bos_id is None else self.token_text(self.bos_id)

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a text, "" if there is none."""
        return "" if self.eos_id is None else self.token_text(self.eos_id)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        stand_ins: Mapping[str, str] | None = None,
        before: str = "",
    ) -> list[int]:
        """The token ids of ``text``.

        ``add_special`` adds BOS and EOS where the model wants them. ``parse_special`` lets
        control tokens written in ``text`` (``<|im_end|>``) become their ids; without it they are
        plain text. User-defined tokens are always matched. ``stand_ins`` maps characters of
        ``text`` to those that take their places once special tokens are found. ``before`` is what
        ``text`` goes on from: where that ends in text, no blank goes between. Raises ``UsageError``
        for what is no text, or has lone surrogates or a run without a word boundary that is too
        long to tokenise.
        """
        if not isinstance(text, str):
            raise UsageError(f"text to tokenise must be a string, got {text!r:.80}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}; give valid Unicode text"
            ) from None
        special = self._special if parse_special else self._always_matched
        table = {ord(mark): character for mark, character in (stand_ins or {}).items()}
        ids: list[int] = []
        after: After = "start"
        if before:
            after = "token" if special.ends(before) else "text"
        for part in special.cut(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_text(part.translate(table) if table else part, after)
            after = "token"
        if not add_special:
            return ids
        if self.add_bos and self.bos_id is not None:
            if ids and ids[0] == self.bos_id:
                _logger.warning("the prompt begins with a BOS token and the model adds one more")
            ids.insert(0, self.bos_id)
        if self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """The ids of two texts that a model compares; control tokens stay text.

        As llama-server makes them: BOS, the first text, EOS and the separator, the second text and
        EOS, each where the model wants it. Raises as ``encode`` does.
        """
        ids = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        ids += self.encode(first, add_special=False)
        if self._ends_first and self.eos_id is not None:
            ids.append(self.eos_id)
        if self.add_sep and self.sep_id is not None:
            ids.append(self.sep_id)
        ids += self.encode(second, add_special=False)
        if self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def count_at_least(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, found without tokenising it."""
        return -(-len(text) // self._max_token_length)

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = False, continues: bool = False
    ) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``skip_special`` leaves control and unknown tokens out; ``continues`` is that of
        ``decoder``. Raises ``UsageError`` for an id outside the vocabulary.
        """
        if not isinstance(ids, Iterable):
            raise UsageError(f"token ids are a sequence of integers, got {ids!r:.80}")
        pieces = (self.token_bytes(token_id, skip_special=skip_special) for token_id in ids)
        data = b"".join(pieces)
        if self.space_prefix and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def decoder(self, *, skip_special: bool = False, continues: bool = False) -> StreamDecoder:
        """A decoder for ids that come one at a time.

        ``continues`` says that other text comes before, so that a leading blank is kept.
        """
        return StreamDecoder(
            lambda token_id: self.token_bytes(token_id, skip_special=skip_special),
            drop_first_space=self.space_prefix and not continues,
        )

    def token_text(self, token_id: int) -> str:
        """The text of a token as the vocabulary stores it."""
        self._check_id(token_id)
        return self._vocabulary.tokens[token_id]

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """The bytes that a token adds to the text; may be part of a character."""
        self._check_id(token_id)
        kind = self._vocabulary.types[token_id]
        if skip_special and kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        text = self._vocabulary.tokens[token_id]
        if kind == TokenType.NORMAL:
            return self._spell(text)
        if kind == TokenType.BYTE:
            return bytes([parse_byte_token(text, token_id)])
        return b"" if kind in (TokenType.UNUSED, TokenType.UNDEFINED) else text.encode("utf-8")

    @abstractmethod
    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        """The ids of a text without special tokens that stands ``after`` something."""

    @abstractmethod
    def _spell(self, text: str) -> bytes:
        """The bytes that a normal token with this text stands for."""

    def _check_id(self, token_id: int) -> None:
        if not hasattr(token_id, "__index__"):
            raise UsageError(f"token ids must be integers, got {token_id!r:.80}")
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )


def _read_adding(
    metadata: Mapping[str, object], name: str, token_id: int | None, *, default: bool
) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    add = read_flag(metadata, key, default=default)
    if add and token_id is None:
        reason = f"{key} is true" if key in metadata else "the pre-tokenizer asks for it"
        raise FormatError(
            f"every prompt needs a {name.upper()} token ({reason}), but "
            f"tokenizer.ggml.{name}_token_id names no token of the vocabulary"
        )
    return add


def _find_special_tokens(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    # By the bytes of the types: a loop over 49,000 takes 3 ms.
    found = _MATCHED_TYPES.finditer(bytes(vocabulary.types))
    return [(vocabulary.tokens[match.start()], match.start()) for match in found]


def _find_stripping(
    metadata: Mapping[str, object], tokens: Sequence[tuple[str, int]]
) -> frozenset[int]:
    """The special tokens that swallow the blanks after them.

    GGUF has no key for that. Phi-3 was trained so; like llama.cpp, its files are known by name.
    """
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    return frozenset(i for text, i in tokens if text not in ("<unk>", "<s>", "<|endoftext|>"))
