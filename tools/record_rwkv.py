"""Records llama.cpp's ids for the vocabulary of RWKV's kind of the tests.

    python -m tools.record_rwkv --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_rwkv.json: ids of fixed and of seeded random texts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tokenizer.rwkv_vocabulary import CONTROL, make_rwkv_metadata
from tools.peer_tokenizer import (
    peer_arguments,
    tokenize_with_peer,
    write_golden,
    write_vocabulary,
)

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_rwkv.json"
FIXED = (
    *("", " ", "hello world", " hello", "  hello  ", "a\n\nb", "thenother", "ell", "a\r\n\r\nb"),
    *("\u4e2d\u6587\u00e9t\u00e9", "\u4e2d", "\u6587\u4e2d\u6587", "it's", "'\"\\", "\\x41\\n\\t"),
    *("aaaaaaaaa", "\U0001f600x", "\t\t\t", "x\0y", "12121"),
)
PARTS = (
    *("the", " the", "then", " hello", "help", "world", "er", "l", "o", "1", "2", "\n", "\r", "\t"),
    *(" ", "'", '"', "\\", "x41", "n", "a", "s", "\u00e9", "t", "\u4e2d", "\u6587", "\u4e18"),
)


def make_texts() -> list[str]:
    """Return the fixed texts and 80 seeded random ones."""
    source = random.Random(5)
    return [
        *FIXED,
        *("".join(source.choices(PARTS, k=source.randint(1, 14))) for _ in range(80)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    texts = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "rwkv.gguf"
        write_vocabulary(model, make_rwkv_metadata())
        # The program takes escapes of its prompt for what they mean.
        escaped = [text.replace("\\", "\\\\") for text in texts]
        ids = tokenize_with_peer(
            options.llama_tokenize, model, escaped, separator=CONTROL, separator_id=0
        )
    write_golden(GOLDEN, options.version, texts, ids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
