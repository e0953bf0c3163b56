"""Published vocabularies against the ids that llama.cpp carries for them.

The files, of 1 to 16 MB, are not in this repository: EDGEH2O_VOCABS names a folder that has them
(models/ in the sources of llama.cpp and in the sdist of llama-cpp-python). X.gguf.inp holds texts,
X.gguf.out the ids of each on one line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import Tokenizer, build_tokenizer

FOLDER = os.environ.get("EDGEH2O_VOCABS")
NAMES = (
    *("llama-spm", "llama-bpe", "qwen2", "qwen35", "phi-3", "gpt-2", "deepseek-llm", "mpt"),
    *("deepseek-coder", "falcon", "starcoder", "command-r", "refact", "gemma-4", "bert-bge"),
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


@pytest.mark.parametrize("name", ["nomic-bert-moe"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(
        FormatError, match="is not supported yet; supported: bert, gemma4, gpt2, llama"
    ):
        load(name)
