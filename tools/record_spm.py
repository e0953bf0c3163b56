"""Records llama.cpp's ids for the SentencePiece vocabulary of the tests.

    python -m tools.record_spm --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_spm.json: ids of fixed and of seeded random texts, for each way in
which model files differ.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.tokenizer.spm_vocabulary import WORDS, make_spm_metadata
from tools.peer_tokenizer import peer_arguments, tokenize_with_peer, write_vocabulary

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_spm.json"
FIXED = (
    *("", " ", "hello world", " hello", "  hello  ", "a\n\nb", "\n\n\n", "<tool>the", "thenother"),
    *("<|user|>  hello", "<|user|> \n\t the<|end|>\n help<|end|>", "hello<|end|>", "<unk> the"),
    *("\u4e2d\u6587\u00e9t\u00e9", "\U0001f600", "\u2581the\u2581", "aaaaaaaaa", "e\u0301\u0000x"),
)
# name -> general.name, add_space_prefix
VARIANTS = {
    "llama": ("tiny", None),
    "gemma": ("tiny", False),
    "phi-3": ("Tiny Phi-3", None),
}


def make_texts() -> list[str]:
    """Return the fixed texts and 60 seeded random ones."""
    source = random.Random(3)
    parts = [word.replace("\u2581", " ") for word in WORDS if not word.startswith("<")]
    parts += [" ", "\n\n", "<tool>", "<|user|>", "<|end|>", "x", "\u0416", "h", "el", "o", "t"]
    return [
        *FIXED,
        *("".join(source.choices(parts, k=source.randint(1, 12))) for _ in range(60)),
    ]


def record(program: Path, texts: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return, for each variant, the ids of each text with control tokens parsed."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "spm.gguf"
        for variant, (name, space_prefix) in VARIANTS.items():
            metadata = make_spm_metadata(add_space_prefix=space_prefix)
            write_vocabulary(model, {**metadata, "general.name": name})
            found[variant] = tokenize_with_peer(
                program, model, texts, separator="<s>", separator_id=1
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    texts = make_texts()
    found = record(options.llama_tokenize, texts)
    variants = ",\n".join(
        f'    "{variant}": {{"name": {json.dumps(VARIANTS[variant][0])}, '
        f'"add_space_prefix": {json.dumps(VARIANTS[variant][1])}, "ids": [\n'
        + ",\n".join(f"      {json.dumps(ids)}" for ids in lists)
        + "\n    ]}"
        for variant, lists in found.items()
    )
    lines = ",\n".join(f"    {json.dumps(text)}" for text in texts)
    GOLDEN.write_text(
        f'{{\n  "made_by": {json.dumps("llama-tokenize of " + options.version)},\n'
        f'  "texts": [\n{lines}\n  ],\n  "variants": {{\n{variants}\n  }}\n}}\n',
        "ascii",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
