"""Records how llama.cpp cuts text into words, for every pre-tokenizer name.

    python -m tools.record_words --llama-tokenize PROGRAM --version TEXT

Rewrites tests/tokenizer/golden_words.json, for the texts that stand in it. The ids of llama.cpp
show its words because the vocabulary made here merges every word whole: each stretch of each text
is a token, and each way to halve it is a merge.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeh2o.errors import EdgeH2OError
from edgeh2o.tokenizer.byte_bpe import to_byte_characters
from edgeh2o.tokenizer.pre_tokenizers import pre_tokenizer_names
from tools.peer_tokenizer import peer_arguments, tokenize_with_peer, write_vocabulary

GOLDEN = Path(__file__).parents[1] / "tests" / "tokenizer" / "golden_words.json"
_SEPARATOR = "<|part|>"


def make_vocabulary(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return tokens and merges that make one token of any word of ``texts``."""
    tokens = dict.fromkeys(to_byte_characters(bytes(range(256))))
    merges: dict[str, None] = {}
    for text in texts:
        data = to_byte_characters(text.encode("utf-8"))
        for length in range(2, len(data) + 1):
            for start in range(len(data) - length + 1):
                stretch = data[start : start + length]
                if stretch not in tokens:
                    tokens[stretch] = None
                    merges |= dict.fromkeys(
                        f"{stretch[:half]} {stretch[half:]}" for half in range(1, length)
                    )
    return list(tokens), list(merges)


def record(program: Path, texts: Sequence[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each name with llama.cpp's words of each text."""
    tokens, merges = make_vocabulary(texts)
    bytes_of = {c: bytes([i]) for i, c in enumerate(to_byte_characters(bytes(range(256))))}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "words.gguf"
        for name in pre_tokenizer_names():
            vocabulary = {
                "model": "gpt2",
                "pre": name,
                "tokens": [*tokens, _SEPARATOR],
                "token_type": [1] * len(tokens) + [3],
                "merges": merges,
                "bos_token_id": len(tokens),
                "eos_token_id": len(tokens),
            }
            write_vocabulary(model, {f"tokenizer.ggml.{k}": v for k, v in vocabulary.items()})
            found = tokenize_with_peer(
                program, model, texts, separator=_SEPARATOR, separator_id=len(tokens)
            )
            words = [
                [b"".join(map(bytes_of.__getitem__, tokens[i])).decode("utf-8") for i in ids]
                for ids in found
            ]
            if ["".join(parts) for parts in words] != list(texts):
                raise EdgeH2OError(f"the words of '{name}' do not make up the texts")
            yield name, words


def format_golden(made_by: str, texts: Sequence[str], words: dict[str, list[list[str]]]) -> str:
    """Return the JSON text, names with the same words on one line."""
    cases = []
    for i, text in enumerate(texts):
        groups: dict[str, list[str]] = {}
        for name in sorted(words):
            groups.setdefault(json.dumps(words[name][i]), []).append(name)
        splits = ",\n".join(
            f'      {{"names": "{" ".join(names)}",\n       "words": {parts}}}'
            for parts, names in sorted(groups.items(), key=lambda item: item[1])
        )
        cases.append(f'    {{"text": {json.dumps(text)}, "splits": [\n{splits}\n    ]}}')
    body = ",\n".join(cases)
    return f'{{\n  "made_by": {json.dumps(made_by)},\n  "cases": [\n{body}\n  ]\n}}\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = peer_arguments(__doc__).parse_args(arguments)
    golden = json.loads(GOLDEN.read_text("ascii"))
    texts = [case["text"] for case in golden["cases"]]
    words = dict(record(options.llama_tokenize, texts))
    made_by = f"llama-tokenize of {options.version}, with a vocabulary that merges every word whole"
    GOLDEN.write_text(format_golden(made_by, texts, words), "ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
