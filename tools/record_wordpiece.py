"""Records llama.cpp's ids for the vocabulary of BERT's kind of the tests.

    python -m tools.record_wordpiece --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_wordpiece.json: ids of fixed and of seeded random texts.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tokenizer.wordpiece_vocabulary import TOKENS, make_wordpiece_metadata
from tools.peer_tokenizer import (
    peer_arguments,
    tokenize_with_peer,
    write_golden,
    write_vocabulary,
)
from tools.tiny_models.tokenizer import ENDINGS, WORDS

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_wordpiece.json"
FIXED = (
    *("", " ", "hello world", " The QUICK\tbrown\nfox ", "jumps over!", "a-b_c d.e,f", "[MASK] it"),
    *("caf\u00e9 na\u00efve", "e\u0301x", "\u4e2d\u6587\u4e2d", "it\u4e2dis", "x\u00a0y\u3000z"),
    *("\u0416 the", "the\u0416", "\u226e", "\u0130t", "\u00df", "it\u200bis", "12 345x", "@#$%^&*"),
    *("testing tests lazily", "\u2581the", "\u201cthe\u201d", "\u20ac5", "a\u0000b", "\ufffd"),
)


def make_texts() -> list[str]:
    """Return the fixed texts and 90 seeded random ones."""
    source = random.Random(5)
    parts = [*WORDS.split(), *ENDINGS.split(), *" " * 12, *"XYZ,.-\u00e9\u4e2d\u0436", "[MASK]"]
    return [
        *FIXED,
        *("".join(source.choices(parts, k=source.randint(1, 12))) for _ in range(90)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    texts = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "wordpiece.gguf"
        write_vocabulary(model, make_wordpiece_metadata())
        ids = tokenize_with_peer(
            options.llama_tokenize,
            model,
            texts,
            separator="[PAD]",
            separator_id=TOKENS.index("[PAD]"),
        )
    write_golden(GOLDEN, options.version, texts, ids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
