"""A small vocabulary of RWKV's kind for the tests."""

from __future__ import annotations

import numpy as np

WORDS = (
    *(b"the", b" the", b"then", b" hello", b"hel", b"help", b"world", b"er", b"el", b"llo", b"12"),
    *(b"\n\n", b"\r\n", b"\t\t", b"    ", b'"\\', b"\\x41", b"\\n", b"aaaa", b"'s"),
    *("\u00e9t".encode(), "\u4e2d".encode(), "\u4e2d\u6587".encode(), b"\xe4\xb8", b"\x96\x87"),
)
CONTROL, UNUSED = "<s>", "[PAD300]"


def write_token(data: bytes) -> str:
    """As converters write it."""
    return repr(data)[2:-1]


def make_rwkv_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata; ``changes`` replace keys of ``tokenizer.ggml``, None takes one out.

    The ids are: one control token, the bytes, the words, one that is unused.
    """
    pieces = [*(bytes([byte]) for byte in range(256)), *WORDS]
    tokens = [CONTROL, *map(write_token, pieces), UNUSED]
    types = [3, *[1] * len(pieces), 5]
    values: dict[str, object] = {
        "model": "rwkv",
        "tokens": tokens,
        "token_type": np.array(types, dtype=np.int32),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "eot_token_id": 1 + pieces.index(b"\n\n"),
    }
    values |= changes
    return {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}
