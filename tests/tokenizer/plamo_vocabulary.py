"""A small vocabulary of PLaMo's kind for the tests, and a plain reference of its choice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tests.tokenizer.spm_vocabulary import stretches_of

WORDS = (
    *("the", " the", "then", " hello", "help", "world", "er", "ell", "or", "llo", "other", "12"),
    *("aaaa", "\u00e9t\u00e9", "\u4e2d\u6587", "\u3053\u3093", "    ", "\n\n", "\U0001f600x"),
)
CONTROL = ("<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>")
UNUSED = "[PAD1]"


def pieces_of(words: tuple[str, ...]) -> list[str]:
    """Every stretch of every word of two characters or more, and some single ones."""
    singles = "helo t1a\u4e2d"
    return sorted(text for text in stretches_of(words) if len(text) > 1 or text in singles)


def make_plamo_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata; ``changes`` replace keys of ``tokenizer.ggml``, None takes one out.

    The ids are: control tokens, the bytes, one that is unused, the pieces. Scores repeat, so that
    ties are common; a few say that a piece is worse than bytes, or never taken.
    """
    pieces = pieces_of(WORDS)
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), UNUSED, *pieces]
    types = [2, 3, 3, 3, 3, *[6] * 256, 5, *[1] * len(pieces)]
    scores = [0.0] * (len(CONTROL) + 256) + [-1000.0]
    scores += [-float(i * 7 % 11) - 2.5 * (len(piece) == 1) for i, piece in enumerate(pieces)]
    for text, score in (("ell", -1500.0), ("other", -3000.0), ("wo", -2.00005), ("the", 0.5)):
        scores[tokens.index(text)] = score
    values: dict[str, object] = {
        "model": "plamo2",
        "pre": "default",
        "tokens": tokens,
        "scores": np.array(scores, dtype=np.float32),
        "token_type": np.array(types, dtype=np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "eot_token_id": 4,
        "add_space_prefix": False,
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}


def best_total(text: str, scores: dict[str, float]) -> float:
    """The greatest sum over all ways to cut the text; characters without a piece have -1,000."""
    if not text:
        return 0.0
    totals = []
    for cuts in range(1 << (len(text) - 1)):
        ends = [0, *(i + 1 for i in range(len(text) - 1) if cuts >> i & 1), len(text)]
        parts = [text[start:end] for start, end in pairwise(ends)]
        if all(part in scores or len(part) == 1 for part in parts):
            # A piece may be worse than the bytes of its only character.
            totals.append(
                sum(
                    max(scores.get(part, -1000.0), -1000.0 if len(part) == 1 else -1e9)
                    for part in parts
                )
            )
    return max(totals)
