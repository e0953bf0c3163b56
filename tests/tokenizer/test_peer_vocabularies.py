"""Published vocabularies against the ids that llama.cpp carries for them.

The files, of 1 to 16 MB, are not in this repository: EDGEH2O_VOCABS names a folder that has them
(models/ in the sources of llama.cpp and in the sdist of llama-cpp-python). X.gguf.inp holds texts,
X.gguf.out the ids of each on one line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from tests.tokenizer.unigram_vocabulary import unigram_library

FOLDER = os.environ.get("EDGEH2O_VOCABS")
NAMES = (
    *("llama-spm", "llama-bpe", "qwen2", "qwen35", "phi-3", "gpt-2", "deepseek-llm", "mpt"),
    *("deepseek-coder", "falcon", "starcoder", "command-r", "refact", "gemma-4", "bert-bge"),
)
XLM_TEXTS = (
    *("", " ", "  two  blanks \n", "a" * 300, "</s> <mask>", "\u2581the", "x\u200by\u00adz"),
    *("Hello world", "caf\u00e9", "\u00c5 \u212b", "\uff21\uff22\uff23", "\ufdfa"),
    *("\u4f60\u597d\u4e16\u754c\u3002", "\u3053\u3093\u306b\u3061\u306f", "3.14159 % of 1,000"),
    *(
        "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
        "\u041f\u0440\u0438\u0432\u0435\u0442!",
        "\u0645\u0631\u062d\u0628\u0627",
    ),
    *(
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "\u16a0\u16a2\u16a6",
    ),
    "\U0001f600 \U0001f680\U0001fae0",
)

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="EDGEH2O_VOCABS names no folder with llama.cpp's ggml-vocab-*.gguf"
)


def load(name: str) -> Tokenizer:
    path = Path(FOLDER or "") / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"EDGEH2O_VOCABS has no {path.name}")
    with open_gguf(path) as gguf:
        return build_tokenizer(gguf.metadata)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    tokenizer = load(name)
    path = Path(FOLDER or "") / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode("utf-8")
    recorded = path.with_suffix(".gguf.out").read_text("ascii").splitlines()
    assert len(recorded) > 40
    separator = "\n__ggml_vocab_test__\n"
    parts = texts.removesuffix(separator).split(separator)
    for text, ids in zip(parts, recorded, strict=True):
        assert tokenizer.encode(text, add_special=False) == [int(i) for i in ids.split()]


@pytest.mark.parametrize("name", ["aquila", "baichuan", "gpt-neox"])
def test_text_survives(name: str) -> None:
    text = "Hello, World! 123 \u00e9\u4e2d\u6587 \U0001f600\n\tx"
    tokenizer = load(name)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_ids_of_xlm_roberta_are_those_of_its_library() -> None:
    """llama.cpp carries no ids of it. The library rewrites the shortest of several texts that a
    table has, llama.cpp and SentencePiece the longest: texts without such are compared."""
    tokenizer = load("nomic-bert-moe")
    with open_gguf(Path(FOLDER or "") / "ggml-vocab-nomic-bert-moe.gguf") as gguf:
        library = unigram_library(gguf.metadata)
    assert tokenizer.vocab_size == 250048 and (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)
    for text in XLM_TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == expected, text
    assert tokenizer.encode("Hello", add_special=True) == [0, 35378, 2]
