"""A small SentencePiece vocabulary for the tests, and a plain reference of its merging."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

WORDS = (
    *("\u2581the", "\u2581then", "\u2581hello", "\u2581help", "\u2581world", "er", "ell", "or"),
    *("llo", "other", "aaaa", "12", "\u00e9t\u00e9", "\u4e2d\u6587", "\u2581\u2581\u2581\u2581"),
    *("</s>", "<0x0A>"),
)
CONTROL = ("<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>")
USER_DEFINED = ("\n\n", "<tool>")


def stretches_of(words: tuple[str, ...]) -> set[str]:
    """Every stretch of every word."""
    return {
        word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, len(word) + 1)
    }


def pieces_of(words: tuple[str, ...]) -> list[str]:
    """Every stretch of every word, so that several orders of merging are possible."""
    return sorted(stretches_of(words) - set(CONTROL) - {"<0x0A>"})


def make_spm_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata; ``changes`` replace keys of ``tokenizer.ggml``, None takes one out.

    The ids are: unknown, BOS, EOS and three more control tokens, the bytes, the user-defined
    tokens, the pieces. Scores repeat, so that ties are common.
    """
    pieces = pieces_of(WORDS)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*CONTROL, *byte_tokens, *USER_DEFINED, *pieces]
    types = [2, *[3] * 5, *[6] * 256, *[4] * len(USER_DEFINED), *[1] * len(pieces)]
    scores = [0.0] * (len(tokens) - len(pieces))
    scores += [-float(i * 7 % 11) - 0.5 * (len(piece) == 1) for i, piece in enumerate(pieces)]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, dtype=np.float32),
        "token_type": np.array(types, dtype=np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}


def merge_slowly(text: str, metadata: dict[str, object]) -> list[str]:
    """Texts of the pieces of ``text``, by the definition; characters without a piece remain."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(scores, np.ndarray)
    assert isinstance(types, np.ndarray)
    score = {t: s for t, s, k in zip(tokens, scores, types, strict=True) if k in (1, 4)}
    parts = list(text)
    while best := max(
        ((score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score),
        default=None,
    ):
        at = -best[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts
