"""RWKV's vocabularies: ids recorded from llama.cpp, the definition, text and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from edgeh2o.tokenizer.rwkv import unescape
from tests.tokenizer.rwkv_vocabulary import UNUSED, WORDS, make_rwkv_metadata, write_token

GOLDEN = json.loads((Path(__file__).parent / "golden_rwkv.json").read_text("ascii"))
METADATA = make_rwkv_metadata()
TOKENIZER = build_tokenizer(METADATA)
TOKENS: list[str] = list(METADATA["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
PIECES = [*(bytes([byte]) for byte in range(256)), *WORDS]


def test_ids_are_those_of_llama_cpp() -> None:
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True):
        assert TOKENIZER.encode(text, add_special=False, parse_special=True) == ids, text


@given(st.text("helotwrdan1' \\\"\n\r\t\u4e2d\u6587\u00e9", max_size=20))
def test_every_token_is_the_longest(text: str) -> None:
    rest = text.encode()
    for token_id in TOKENIZER.encode(text, add_special=False):
        longest = max((piece for piece in PIECES if rest.startswith(piece)), key=len)
        assert PIECES[token_id - 1] == longest == TOKENIZER.token_bytes(token_id)
        rest = rest.removeprefix(longest)
    assert rest == b""


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_decoding_undoes_encoding(parts: list[str]) -> None:
    text = "the".join(parts)
    ids = TOKENIZER.encode(text, add_special=False)
    assert TOKENIZER.decode(ids) == text
    decoder = TOKENIZER.decoder()
    assert "".join([*(decoder.push(i) for i in ids), decoder.finish()]) == text


@given(st.binary())
def test_tokens_are_written_as_python_writes_bytes(data: bytes) -> None:
    assert unescape(write_token(data)) == data


def test_what_text_does_not_become() -> None:
    for text in ("<s>", UNUSED):
        ids = TOKENIZER.encode(text, add_special=False)
        assert TOKENS.index(text) not in ids and TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode("<s>", add_special=False, parse_special=True) == [0]


def test_what_a_file_says() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.add_bos) == (0, 0, False)
    assert {0, TOKENS.index(r"\n\n")} <= TOKENIZER.eog_ids
    assert TOKENIZER.model_name == "rwkv" and not TOKENIZER.space_prefix
    assert build_tokenizer(make_rwkv_metadata(add_bos_token=True)).encode("then")[0] == 0
    unnamed = build_tokenizer(make_rwkv_metadata(bos_token_id=None, eos_token_id=None))
    assert (unnamed.bos_id, unnamed.eos_id) == (0, 0)


def test_a_vocabulary_without_a_byte() -> None:
    tokens = [text for text in TOKENS if text != r"\x07"]
    types = np.delete(np.asarray(METADATA["tokenizer.ggml.token_type"]), 1)
    tokenizer = build_tokenizer(make_rwkv_metadata(tokens=tokens, token_type=types))
    with pytest.raises(FormatError, match="no token of the byte 0x07"):
        tokenizer.encode("x")
