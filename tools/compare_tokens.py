"""Compares token ids with those of llama.cpp, on its vocabulary files and on random text.

    python -m tools.compare_tokens --llama-tokenize PROGRAM --strings 1000 FILE.gguf...

All texts of a file go through one run of the program, apart from each other by a control token
(parsed, so that each text stands alone). Prints the texts whose ids differ; the exit code is 1 if
there are any. Texts never hold a lone surrogate, which neither side takes.
"""

from __future__ import annotations

import argparse
import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from edgeh2o.errors import EdgeH2OError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from tools.peer_tokenizer import tokenize_with_peer

# Beginnings of blocks with many letters, and what the rules treat apart.
_BLOCKS = (0x21, 0x61, 0xC0, 0x391, 0x410, 0x5D0, 0x627, 0x905, 0xE01, 0x3041, 0x4E00, 0xAC00)
_PIECES = (
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "'s",
    "'LL",
    "12345",
    "...",
    "e\u0301",
)
_EMOJI = ("\U0001f600", "\U0001f468\u200d\U0001f469", "\u2764\ufe0f")


def make_texts(count: int, seed: int, special: Sequence[str]) -> list[str]:
    """Seeded random texts: words of several scripts, any assigned character, special tokens."""
    source = random.Random(seed)

    def make_part() -> str:
        kind = source.random()
        if kind < 0.35:
            return "".join(source.choices("etaoinshrdlu", k=source.randint(1, 9)))
        if kind < 0.6:
            return source.choice((*_PIECES, *_EMOJI))
        if kind < 0.75:
            start = source.choice(_BLOCKS)
            return "".join(chr(start + source.randrange(26)) for _ in range(source.randint(1, 5)))
        if kind < 0.95 or not special:
            return _any_character(source)
        return source.choice(special)

    return ["".join(make_part() for _ in range(source.randint(1, 12))) for _ in range(count)]


def _any_character(source: random.Random) -> str:
    while True:
        character = chr(source.choice((source.randrange(1, 0x3000), source.randrange(1, 0x110000))))
        # Not what newer versions of Unicode assigned, which the engines may know or not.
        if unicodedata.ucd_3_2_0.category(character) not in ("Cn", "Cs", "Co"):
            return character


def choose_separator(tokenizer: Tokenizer) -> int:
    """Return the id of a control token: BOS where there is one."""
    for token_id in (tokenizer.bos_id, *tokenizer.eog_ids):
        if token_id is not None and tokenizer.encode(
            tokenizer.token_text(token_id), add_special=False, parse_special=True
        ) == [token_id]:
            return token_id
    raise EdgeH2OError("the vocabulary has no control token to set texts apart with")


def compare(program: Path, model: Path, *, count: int, seed: int) -> list[str]:
    """Return one line for each random text whose ids differ."""
    with open_gguf(model) as gguf:
        tokenizer = build_tokenizer(gguf.metadata)
        types = gguf.metadata.get("tokenizer.ggml.token_type")
    separator_id = choose_separator(tokenizer)
    kinds = [] if types is None else types.tolist()  # type: ignore[attr-defined]
    named = [i for i, kind in enumerate(kinds) if kind in (3, 4) and i != separator_id]
    separator = tokenizer.token_text(separator_id)
    texts = make_texts(count, seed, [tokenizer.token_text(i) for i in named[:200]])
    texts = [text for text in texts if separator not in text]
    expected = tokenize_with_peer(
        program, model, texts, separator=separator, separator_id=separator_id
    )
    if len(expected) != len(texts):
        raise EdgeH2OError(f"{len(texts)} texts gave {len(expected)} lists of ids")
    lines = []
    for text, ids in zip(texts, expected, strict=True):
        own = tokenizer.encode(text, add_special=False, parse_special=True)
        if own != ids:
            lines.append(f"{text!a}\n  llama.cpp {ids}\n  edgeh2o   {own}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--llama-tokenize", required=True, type=Path, metavar="PROGRAM")
    parser.add_argument("--strings", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    differs = False
    for model in options.models:
        try:
            lines = compare(options.llama_tokenize, model, count=options.strings, seed=options.seed)
        except EdgeH2OError as error:
            print(f"{model.name}: {error}")
            continue
        differs = differs or bool(lines)
        print(f"{model.name}: {len(lines)} of {options.strings} texts differ")
        print(*lines[:5], sep="\n")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
