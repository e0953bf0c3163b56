"""Fuzz target of the tokenizers: building one from metadata, encoding, decoding.

python -m tools.fuzz_tokenizer --seconds 60 [--corpus DIR]

An input is JSON, so that most changes of a byte still reach the builder: the text to encode and
the tokenizer keys of a file, numeric arrays as {"int32": [...]}. What is not that is passed over;
the GGUF reader has a target of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from tests.tokenizer.plamo_vocabulary import make_plamo_metadata
from tests.tokenizer.rwkv_vocabulary import make_rwkv_metadata
from tests.tokenizer.spm_vocabulary import make_spm_metadata
from tests.tokenizer.unigram_vocabulary import make_unigram_metadata
from tests.tokenizer.vocabularies import make_metadata
from tools.fuzz_loop import instrumented_imports, run_fuzzer

with instrumented_imports():
    from edgeh2o.tokenizer import build_tokenizer

TEXT = "hello  the world\n\n 1234 <|user|> </s> \u00e9\u4e2d\u6587 \U0001f600 aaaa'll Then"
PRE_NAMES = ("gpt-2", "llama-bpe", "deepseek-llm", "superbpe", "kimi-k2", "jais-2", "exaone-moe")
DTYPES = ("int8", "uint8", "int32", "uint32", "float32")


def make_seeds() -> Iterator[bytes]:
    """Small correct vocabularies of both kinds."""
    for pre in PRE_NAMES:
        yield _write_input(make_metadata(pre=pre))
    yield _write_input(make_plamo_metadata())
    yield _write_input(make_rwkv_metadata())
    yield _write_input(make_spm_metadata())
    yield _write_input(make_unigram_metadata())
    yield _write_input({**make_spm_metadata(add_space_prefix=False), "general.name": "phi-3"})


def _write_input(metadata: Mapping[str, object]) -> bytes:
    values = {
        key: {str(value.dtype): value.tolist()} if isinstance(value, np.ndarray) else value
        for key, value in metadata.items()
    }
    # Long arrays come last: most changes go to the start of an input.
    ordered = dict(sorted(values.items(), key=lambda item: len(str(item[1]))))
    return json.dumps({"text": TEXT, "metadata": ordered}).encode("ascii")


def _read_input(content: bytes) -> tuple[str, dict[str, object]] | None:
    try:
        values = json.loads(content)
        text, metadata = values["text"], values["metadata"]
        for key, value in metadata.items():
            if isinstance(value, dict):
                [(dtype, entries)] = value.items()
                if dtype not in DTYPES:
                    return None
                metadata[key] = np.array(entries, dtype=dtype).reshape(-1)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return (text, cast("dict[str, object]", metadata)) if isinstance(text, str) else None


def build_and_encode(content: bytes) -> None:
    """What ``edgeh2o run`` asks of a tokenizer, and that its answers fit together."""
    values = _read_input(content)
    if values is None:
        return
    text, metadata = values
    tokenizer = build_tokenizer(metadata)
    for parse_special in (False, True):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
        decoder = tokenizer.decoder()
        streamed = "".join(map(decoder.push, ids)) + decoder.finish()
        assert streamed == tokenizer.decode(ids)


def main() -> int:
    """Command line entry; returns the exit code."""
    logging.disable(logging.WARNING)
    return run_fuzzer(build_and_encode, make_seeds(), name="fuzz_tokenizer")


if __name__ == "__main__":
    raise SystemExit(main())
