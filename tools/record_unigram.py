"""Records llama.cpp's ids for the vocabulary of XLM-RoBERTa's kind of the tests.

    python -m tools.record_unigram --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_unigram.json: ids of fixed and of seeded random texts, for each way
of writing blanks.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tokenizer.unigram_vocabulary import (
    OWN,
    WAYS,
    WORDS,
    make_unigram_metadata,
    replacements,
)
from tools.peer_tokenizer import peer_arguments, tokenize_with_peer, write_vocabulary

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_unigram.json"
FIXED = (
    *("", " ", "hello world", " hello", "  hello  ", "a\n\nb", "\n\n\n", f"{OWN}the", "thenother"),
    *(f"hello {OWN} then", f" {OWN}", "</s>  hello", "the</s> \n the", "<unk> the", "x\u200by"),
    *("\u4e2d\u6587caf\u00e9", "cafe\u0301", "\U0001f600\U0001f601 \U0001f600", "\u2581the\u2581"),
    *("aaaaaaaaa", "\ufdfa", "\uff34he\u3000then", "[PAD7]", "a\u0323\u0302", "\ufb01\u2026"),
    *("\u0e01\u0e33", "\ud55c\uad6d", "\u1100\u1161", "he\u00adllo", "1212 12", "\x01\x01the"),
)


def make_texts() -> list[str]:
    """Return the fixed texts and 70 seeded random ones."""
    source = random.Random(7)
    parts = [word.replace("\u2581", " ") for word in WORDS]
    parts += [*replacements(), *" helot,.12\u0416\u4e2d", "  ", "\n", OWN, "</s>", "\U0001f600"]
    return [
        *FIXED,
        *("".join(source.choices(parts, k=source.randint(1, 12))) for _ in range(70)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    texts, found = make_texts(), []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "unigram.gguf"
        for adds, joins in WAYS:
            metadata = make_unigram_metadata(add_space_prefix=adds, remove_extra_whitespaces=joins)
            write_vocabulary(model, metadata)
            found.append(
                tokenize_with_peer(
                    options.llama_tokenize, model, texts, separator="<pad>", separator_id=1
                )
            )
    lines = ",\n".join(f"    {json.dumps(text)}" for text in texts)
    ways = ",\n".join(
        "    [\n" + ",\n".join(f"      {json.dumps(ids)}" for ids in lists) + "\n    ]"
        for lists in found
    )
    made_by = json.dumps("llama-tokenize of " + options.version)
    GOLDEN.write_text(
        f'{{\n  "made_by": {made_by},\n  "texts": [\n{lines}\n  ],\n  "ways": [\n{ways}\n  ]\n}}\n',
        "ascii",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
