"""A small byte-level BPE vocabulary for the tests, and a plain reference of its merging."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

WORDS = ("the", "then", "hello", "help", "world", "other", "aaaa", "12", "\u00e9", "\u4e2d\u6587")
SPECIAL = ("<|begin|>", "<|end_of_text|>", "<|note|>", "<|note|>s", "<unk>")


def byte_characters() -> list[str]:
    """The character of each byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    characters = []
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


def to_byte_characters(text: str) -> str:
    characters = byte_characters()
    return "".join(characters[byte] for byte in text.encode("utf-8"))


def merges_of(words: Sequence[str]) -> list[str]:
    """Merges that build each word, with and without a leading space, from left to right."""
    merges: dict[str, None] = {}
    for word in words:
        text = to_byte_characters(word)
        for end in range(2, len(text) + 1):
            merges[f"{text[: end - 1]} {text[end - 1]}"] = None
        merges[f"{to_byte_characters(' ')} {text}"] = None
    return list(merges)


def make_metadata(*, without: Sequence[str] = (), **changes: object) -> dict[str, object]:
    """GGUF metadata of the vocabulary; ``changes`` replace keys of ``tokenizer.ggml``.

    The ids are: the bytes, the merged tokens, then ``SPECIAL``.
    """
    merges = merges_of(WORDS)
    merged = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    plain = [token for token in (*byte_characters(), *merged) if token not in without]
    tokens = [*plain, *SPECIAL]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([1] * len(plain) + [3, 3, 4, 3, 2], dtype=np.int32),
        "merges": merges,
        "bos_token_id": len(plain),
        "eos_token_id": len(plain) + 1,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}


def merge_slowly(text: str, metadata: dict[str, object]) -> list[str]:
    """Token texts of ``text`` made of ASCII letters and spaces, by the definition of BPE."""
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    texts: list[str] = []
    for word in re.findall(r" ?[a-z]+| +(?![a-z])| +(?= )", text):
        parts = list(to_byte_characters(word))
        while pairs := [p for p in pairwise(parts) if p in rank]:
            best = min(pairs, key=lambda pair: rank[pair])
            at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
            parts[at : at + 2] = ["".join(best)]
        texts += parts
    return texts
