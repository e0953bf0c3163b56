"""A small vocabulary of BERT's kind, as the metadata of a GGUF file, and its definition."""

from __future__ import annotations

import numpy as np

from tools.tiny_models.tokenizer import WORDPIECE_CONTROL, wordpiece_vocabulary

TOKENS = [*wordpiece_vocabulary(), "\u2581caf\u00e9", "\u2581na\u00efve", "\u2581Caps", "[unused1]"]
N_CONTROL = len(WORDPIECE_CONTROL)
CONTROL, NORMAL, UNUSED = 3, 1, 5


def make_wordpiece_metadata(**changes: object) -> dict[str, object]:
    """With other values of ``tokenizer.ggml.*``; None leaves a key out."""
    types = np.full(len(TOKENS), NORMAL, np.int32)
    types[:N_CONTROL], types[-1] = CONTROL, UNUSED
    ids = {
        name: WORDPIECE_CONTROL.index(text)
        for name, text in (
            ("bos", "[CLS]"),
            ("eos", "[SEP]"),
            ("unknown", "[UNK]"),
            ("seperator", "[SEP]"),
            ("padding", "[PAD]"),
            ("mask", "[MASK]"),
        )
    }
    named = {
        "model": "bert",
        "pre": "default",
        "tokens": tuple(TOKENS),
        "token_type": types,
        **{f"{name}_token_id": token_id for name, token_id in ids.items()},
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


def longest_pieces(word: str) -> list[str] | None:
    """The definition: of what is left of the word the longest piece, None if there is none."""
    pieces, known = [], set(TOKENS[N_CONTROL:-1])
    rest = "\u2581" + word
    while rest:
        length = next((n for n in range(len(rest), 0, -1) if rest[:n] in known), 0)
        if not length:
            return None
        pieces.append(rest[:length])
        rest = rest[length:]
    return pieces
