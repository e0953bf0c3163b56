"""A small vocabulary of XLM-RoBERTa's kind, a table as SentencePiece writes it, and definitions."""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from tests.tokenizer.spm_vocabulary import stretches_of
from tools.tiny_models.tokenizer import UNIGRAM_CONTROL, unigram_vocabulary

WORDS = (
    *("\u2581the", "\u2581then", "\u2581other", "\u2581hello", "world", "help", "12", "caf\u00e9"),
    *("\u4e2d\u6587", "\u3053\u3093", "\u0e01\u0e33", "\ud55c\uad6d", "aaaa", "\u2581,", "..."),
)
ALONE = "\u2581abcdefghilmnoprstw12,.!?\u00e9\u4e2d\u6587\u3053\uac00"
CONTROL, UNKNOWN, USER_DEFINED, UNUSED, NORMAL = 3, 2, 4, 5, 1
# Whether a blank goes before a text, and whether blanks are joined.
WAYS = ((True, True), (True, False), (False, True), (False, False))
OWN, UNUSED_TEXT = "<own>", "[PAD7]"
_BLANKS = "\t\n\r \u00a0\u1680\u2000\u2009\u2028\u202f\u205f\u3000"
_DROPPED = "\x01\x1f\x7f\u00ad\u200b\u200e\ufeff"
_REWRITTEN = (
    *map(chr, (*range(0xA0, 0x180), *range(0xFB00, 0xFB07), *range(0xFF01, 0xFF5F))),
    *("\u2460", "\u3300", "\ufdfa", "\u212b", "\u1100\u1161", "\u0e4d", "\u2026", "\U0001d400"),
    *("e\u0301", "e\u0302\u0301", "a\u0323\u0302", "\u00e2\u0323", "c\u0327", "n\u0303"),
)


def replacements() -> dict[str, str]:
    """Texts and what takes their places: NFKC of some, blanks, what goes."""
    table = {text: unicodedata.normalize("NFKC", text) for text in _REWRITTEN}
    table = {text: new for text, new in table.items() if text != new}
    table |= dict.fromkeys(_BLANKS, " ") | dict.fromkeys(_DROPPED, "")
    del table[" "]
    return table


def build_charsmap(table: Mapping[str, str]) -> bytes:
    """As SentencePiece writes it: a double array by XOR, and replacements that end with a 0."""
    texts = sorted({*table.values()})
    blob, numbers = b"", {}
    for text in texts:
        numbers[text] = len(blob)
        blob += text.encode("utf-8") + b"\0"
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    for text, new in table.items():
        node = root
        for byte in text.encode("utf-8"):
            node = node.setdefault(byte, {})
        node[0] = numbers[new]  # type: ignore[assignment]
    units: list[int | None] = [0]
    states, waiting = set(), [(0, 0, root)]
    while waiting:
        at, label, node = waiting.pop()
        children = sorted(node)
        state = next(
            state
            for state in range(1, 1 << 20)
            if state not in states and all(_is_free(units, state ^ byte) for byte in children)
        )
        states.add(state)
        units += [None] * (max(state ^ byte for byte in children) + 1 - len(units))
        units[at] = label | int(0 in node) << 8 | (at ^ state) << 10
        for byte in children:
            units[state ^ byte] = 0
            if byte:
                waiting.append((state ^ byte, byte, node[byte]))
            else:
                units[state] = 1 << 31 | node[0]  # type: ignore[operator]
    units += [None] * (-len(units) % 256)  # as there: no step leads out of it
    packed = struct.pack(f"<{len(units)}I", *(unit or 0 for unit in units))
    return struct.pack("<I", len(packed)) + packed + blob


@cache
def charsmap() -> bytes:
    """The table of ``replacements``."""
    return build_charsmap(replacements())


def _is_free(units: list[int | None], at: int) -> bool:
    return at >= len(units) or units[at] is None


def pieces() -> list[str]:
    """Every stretch of every word of two characters or more, and some single ones."""
    long = (text for text in stretches_of(WORDS) if len(text) > 1)
    return list(dict.fromkeys([*unigram_vocabulary(), *sorted(long), *ALONE]))


def make_unigram_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata as of XLM-RoBERTa; ``changes`` replace keys of ``tokenizer.ggml``.

    None takes one out. Scores repeat, so that ties are common.
    """
    n_control = len(UNIGRAM_CONTROL)
    plain = [text for text in pieces() if text not in UNIGRAM_CONTROL]
    tokens = [*UNIGRAM_CONTROL, *plain, OWN, UNUSED_TEXT]
    types = [NORMAL] * len(tokens)
    types[:n_control] = [CONTROL, CONTROL, CONTROL, UNKNOWN]
    types[-2:] = [USER_DEFINED, UNUSED]
    scores = [-2.0 - i * 7 % 11 - 3.5 * (len(text) == 1) for i, text in enumerate(tokens)]
    scores[:n_control] = [0.0] * n_control
    scores[-2:] = [-3.0, -10000.0]
    named = {
        "model": "t5",
        "pre": "default",
        "tokens": tuple(tokens),
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        **{
            f"{name}_token_id": UNIGRAM_CONTROL.index(text)
            for name, text in (
                ("bos", "<s>"),
                ("eos", "</s>"),
                ("seperator", "</s>"),
                ("unknown", "<unk>"),
                ("padding", "<pad>"),
            )
        },
        "add_bos_token": True,
        "add_eos_token": True,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": np.frombuffer(charsmap(), np.uint8),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


def rewrite_slowly(text: str) -> str:
    """The definition: the longest text of the table, again and again; blanks are joined."""
    table, out = replacements(), ""
    while text:
        length = next((n for n in range(min(len(text), 4), 0, -1) if text[:n] in table), 0)
        out += table[text[:length]] if length else text[0]
        text = text[length or 1 :]
    return "".join(f"\u2581{word}" for word in out.split(" ") if word)


def best_total(text: str, scores: Mapping[str, float], unknown: float) -> float:
    """The greatest sum over all ways to cut the text; a character without a piece is unknown."""
    totals = []
    for cuts in range(1 << max(len(text) - 1, 0)):
        ends = [0, *(i + 1 for i in range(len(text) - 1) if cuts >> i & 1), len(text)]
        parts = [text[start:end] for start, end in pairwise(ends)]
        if all(part in scores or len(part) == 1 for part in parts):
            totals.append(sum(scores.get(part, unknown) for part in parts))
    return max(totals)


def unigram_library(metadata: Mapping[str, Any]) -> Pipeline:
    """The same vocabulary in the ``tokenizers`` library, whose settings are XLM-RoBERTa's."""
    values = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    rows = zip(values["tokens"], values["scores"].tolist(), values["token_type"], strict=True)
    # What is no piece has a text that none has, and is not the worst.
    vocabulary = [
        (text, score) if kind == NORMAL else (f"\0{text}", 0.0) for text, score, kind in rows
    ]
    pipeline = Pipeline(models.Unigram(vocabulary, unk_id=values["unknown_token_id"]))
    pipeline.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(values["precompiled_charsmap"].tobytes()),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return pipeline
