"""Records llama.cpp's ids for the vocabulary of PLaMo's kind of the tests.

    python -m tools.record_plamo2 --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_plamo2.json: ids of fixed and of seeded random texts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tokenizer.plamo_vocabulary import WORDS, make_plamo_metadata
from tools.peer_tokenizer import (
    peer_arguments,
    tokenize_with_peer,
    write_golden,
    write_vocabulary,
)

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_plamo2.json"
FIXED = (
    *("", " ", "hello world", " hello", "  hello  ", "a\n\nb", "thenother", "ell", "other", "wo"),
    *("<|plamo:op|> hello", "then<|plamo:op|>\n", "\u4e2d\u6587\u00e9t\u00e9", "\U0001f600x"),
    *("aaaaaaaaa", "e\u0301x", "\u3053\u3093\u306b", "\ufeffthe", "\U0001f680", "12121"),
)


def make_texts() -> list[str]:
    """Return the fixed texts and 80 seeded random ones."""
    source = random.Random(3)
    parts = [*WORDS, " ", "<|plamo:op|>", "x", "\u0416", "h", "el", "o", "t", "e", "l", "a", "1"]
    return [
        *FIXED,
        *("".join(source.choices(parts, k=source.randint(1, 12))) for _ in range(80)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    texts = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "plamo2.gguf"
        write_vocabulary(model, make_plamo_metadata())
        ids = tokenize_with_peer(
            options.llama_tokenize, model, texts, separator="<|plamo:bos|>", separator_id=1
        )
    write_golden(GOLDEN, options.version, texts, ids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
