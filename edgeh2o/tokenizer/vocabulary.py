"""The vocabulary of a GGUF file: token texts, token types and the ids with a meaning.

The rules for ids, types and the end of a generation follow llama.cpp, whose files these are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from ..errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_logger = logging.getLogger(__name__)

# The longest token of a published vocabulary has 512 characters.
MAX_TOKEN_LENGTH = 65536
# What SentencePiece writes for a space.
BLANK = "\u2581"


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts, separated by blanks, that end a generation, whatever the file says about their type.
_END_OF_GENERATION_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)

# Markers of fill-in-the-middle prompts: key of the id, texts that stand for it without the key.
EOG_IDS_KEY = "tokenizer.ggml.eog_token_ids"  # for more ends than the other keys name
_FIM_TEXTS = {
    "fim_pre": (
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
        "<|code_prefix|> <|prefix|>"
    ),
    "fim_suf": (
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
        "<|code_suffix|> <|suffix|>"
    ),
    "fim_mid": (
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
        "<|code_middle|> <|middle|>"
    ),
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_FIM_THAT_END = ("fim_pad", "fim_rep", "fim_sep")

# Channel markers of the harmony format: always matched and always shown.
_ALWAYS_USER_DEFINED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts as the file stores them, their types, and the ids with a meaning.

    ``fim_ids`` are those of markers to fill in the middle: "fim_pre", "fim_suf" and so on.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    fim_ids: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


def read_vocabulary(
    metadata: Mapping[str, object], *, default_ids: Mapping[str, int] | None = None
) -> Vocabulary:
    """Reads and checks the vocabulary keys of a GGUF file; raises ``FormatError``.

    ``default_ids`` are the ids of "bos" and "eos" where the file does not name them.
    """
    tokens = _read_tokens(metadata)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        second = next(i for i, token in enumerate(tokens) if ids[token] != i)
        text = tokens[second]
        raise FormatError(
            f"tokenizer.ggml.tokens[{ids[text]}] repeats the text of entry {second}: {text[:40]!r}"
        )
    types = _read_types(metadata, tokens)
    _check_scores(metadata, len(tokens))
    defaults = default_ids or {}
    bos_id = read_token_id(metadata, "bos", len(tokens), default=defaults.get("bos"))
    eos_id = read_token_id(metadata, "eos", len(tokens), default=defaults.get("eos"))
    fim_ids = _find_markers(metadata, types, ids)
    eog_ids = _find_end_of_generation(metadata, tokens, types, ids, eos_id, fim_ids)
    return Vocabulary(tuple(tokens), tuple(types), ids, bos_id, eos_id, eog_ids, fim_ids)


def read_string_list(metadata: Mapping[str, object], key: str) -> list[str]:
    """An array of strings as a list; raises ``FormatError`` if it is anything else."""
    value = metadata.get(key)
    if value is None:
        raise FormatError(f"the key {key} is missing; convert the model again with its vocabulary")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise FormatError(f"{key} must be an array of strings, not {type(value).__name__}")
    texts = list(value)
    if set(map(type, texts)) - {str}:
        i = next(i for i, text in enumerate(texts) if type(text) is not str)
        raise FormatError(f"{key}[{i}] must be a string, not {type(texts[i]).__name__}")
    return texts


def read_flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    """A boolean key; raises ``FormatError`` if the value is of another type."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatError(f"{key} must be true or false, not {value!r}")
    return value


def read_scores(metadata: Mapping[str, object], vocab_size: int) -> NDArray[np.float32]:
    """``tokenizer.ggml.scores``, one float32 per token; raises ``FormatError``."""
    import numpy as np

    key = "tokenizer.ggml.scores"
    value = metadata.get(key)
    if value is None:
        raise FormatError(f"the key {key} is missing; convert the model again with its vocabulary")
    _check_scores(metadata, vocab_size)
    scores = np.asarray(value, dtype=np.float32)[:vocab_size]
    if np.isnan(scores).any():
        raise FormatError(f"{key}[{int(np.isnan(scores).argmax())}] is not a number")
    return scores


def read_token_id(
    metadata: Mapping[str, object], name: str, vocab_size: int, *, default: int | None = None
) -> int | None:
    """``tokenizer.ggml.{name}_token_id``.

    Where it is absent or names no token it is ``default``, and None if that names none either.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if default is not None and default >= vocab_size:
        default = None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{key} must be an integer, not {value!r}")
    if not 0 <= value < vocab_size:
        _logger.warning("ignoring %s = %d: the vocabulary has %d tokens", key, value, vocab_size)
        return default
    return value


def _read_ids(metadata: Mapping[str, object], key: str, vocab_size: int) -> list[int]:
    """An array of token ids, if there is one; ids beyond the vocabulary are left out."""
    value = metadata.get(key)
    if value is None:
        return []
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, (list, tuple)) or not all(type(item) is int for item in items):
        raise FormatError(f"{key} must be an array of integers, not {value!r:.80}")
    for token_id in items:
        if not 0 <= token_id < vocab_size:
            _logger.warning(
                "ignoring %d of %s: the vocabulary has %d tokens", token_id, key, vocab_size
            )
    return [token_id for token_id in items if 0 <= token_id < vocab_size]


def _read_tokens(metadata: Mapping[str, object]) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = read_string_list(metadata, key)
    if not tokens:
        raise FormatError(f"{key} is empty; convert the model again with its vocabulary")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_LENGTH:
        i = next(i for i, token in enumerate(tokens) if len(token) > MAX_TOKEN_LENGTH)
        raise FormatError(
            f"{key}[{i}] has {len(tokens[i])} characters; at most {MAX_TOKEN_LENGTH} are allowed"
        )
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError:
        i = next(i for i, token in enumerate(tokens) if not _is_unicode(token))
        raise FormatError(f"{key}[{i}] is not valid UTF-8: {tokens[i][:40]!r}") from None
    if "" in tokens:
        empty = [i for i, token in enumerate(tokens) if not token]
        _logger.warning("%s[%d] is empty (%d in all)", key, empty[0], len(empty))
        for i in empty:
            tokens[i] = f"[EMPTY_{i}]"
    return tokens


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_types(metadata: Mapping[str, object], tokens: Sequence[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        return [int(TokenType.NORMAL)] * len(tokens)
    _check_array(key, value, ("int32", "uint32"), len(tokens))
    types: list[int] = value.tolist()[: len(tokens)]  # type: ignore[attr-defined]
    known = {int(kind) for kind in TokenType}
    if not known.issuperset(types):
        i = next(i for i, kind in enumerate(types) if kind not in known)
        raise FormatError(f"{key}[{i}] is {types[i]}; token types go from 0 to {max(known)}")
    if TokenType.BYTE in types:
        for i, kind in enumerate(types):
            if kind == TokenType.BYTE:
                parse_byte_token(tokens[i], i)
    return types


def parse_byte_token(text: str, token_id: int) -> int:
    """The byte that a token like ``<0x0A>`` stands for; raises ``FormatError``."""
    digits = text[3:5]
    if text != f"<0x{digits}>" or not set(digits) <= set("0123456789ABCDEFabcdef"):
        raise FormatError(
            f"tokenizer.ggml.tokens[{token_id}] is of the byte type but reads {text[:40]!r}; "
            "byte tokens read <0x00> to <0xFF>"
        )
    return int(digits, 16)


def spell_piece(text: str) -> bytes:
    """The UTF-8 bytes of a text that has ``BLANK`` for a space."""
    return text.replace(BLANK, " ").encode("utf-8")


def _check_scores(metadata: Mapping[str, object], vocab_size: int) -> None:
    key = "tokenizer.ggml.scores"
    if key in metadata:
        _check_array(key, metadata[key], ("float32", "int32"), vocab_size)


def _check_array(key: str, value: object, dtypes: tuple[str, ...], n_tokens: int) -> None:
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if dtype not in dtypes:
        raise FormatError(f"{key} must be an array of {' or '.join(dtypes)}, not {dtype}")
    length = len(value)  # type: ignore[arg-type]
    if length < n_tokens:
        raise FormatError(
            f"{key} ends at entry {length}, but tokenizer.ggml.tokens has {n_tokens} entries"
        )


def _find_markers(
    metadata: Mapping[str, object], types: list[int], ids: Mapping[str, int]
) -> dict[str, int]:
    """The ids of markers to fill in the middle; corrects ``types`` of those without a key."""
    found = {}
    for name, texts in _FIM_TEXTS.items():
        fim_id = read_token_id(metadata, name, len(ids))
        if fim_id is None:
            fim_id = min((ids[text] for text in texts.split() if text in ids), default=None)
            if fim_id is None:
                continue
            types[fim_id] = TokenType.CONTROL
        found[name] = fim_id
    return found


def _find_end_of_generation(
    metadata: Mapping[str, object],
    tokens: Sequence[str],
    types: list[int],
    ids: Mapping[str, int],
    eos_id: int | None,
    fim_ids: Mapping[str, int],
) -> frozenset[int]:
    """The ids that end a generation; corrects ``types`` of texts with a fixed meaning."""
    ending = {ids[text] for text in _END_OF_GENERATION_TEXTS.split() if text in ids}
    for token_id in ending:
        types[token_id] = TokenType.CONTROL
    named = [eos_id, *(read_token_id(metadata, name, len(ids)) for name in ("eot", "eom"))]
    named += [fim_ids.get(name) for name in _FIM_THAT_END]
    ending.update(token_id for token_id in named if token_id is not None)
    ending.update(_read_ids(metadata, EOG_IDS_KEY, len(ids)))
    for text in _ALWAYS_USER_DEFINED:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED

    endings = {tokens[i] for i in ending}
    # In the harmony and Solar formats <|end|> ends a message, not the turn.
    if {"<|end|>", "<|return|>", "<|call|>"} <= endings or (
        {"<|end|>", "<|flush|>"} <= endings and endings & {"<|call|>", "<|calls|>"}
    ):
        ending.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    # Vocabularies with these ends use </s> as a plain text token.
    if "</s>" in endings and endings & {"<|tool_response>", "<|plamo:eos|>"}:
        ending.discard(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(ending)
