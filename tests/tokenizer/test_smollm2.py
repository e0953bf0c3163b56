"""The published vocabulary of SmolLM2 against ids made by llama.cpp."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import Tokenizer, build_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text("ascii"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with open_gguf(smollm2_path) as gguf:
        return build_tokenizer(gguf.metadata)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ascii(case["text"])[:30])
def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, case: dict[str, object]) -> None:
    text, parse_special = case["text"], case["parse_special"]
    assert isinstance(text, str)
    assert isinstance(parse_special, bool)
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    assert ids == case["ids"]


def test_the_ids_with_a_meaning(tokenizer: Tokenizer) -> None:
    assert (tokenizer.model_name, tokenizer.pre_name) == ("gpt2", "smollm")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, 1, 2)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (False, False)
    # <|endoftext|>, <|im_end|> and <reponame>: what llama.cpp lists for this file.
    assert tokenizer.eog_ids == {0, 2, 4}


@given(
    st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]) | st.just("\n"))
)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


def test_a_megabyte_takes_seconds_at_most(tokenizer: Tokenizer) -> None:
    # About 0.7 s on one core of 2019; the bound only catches a change of the order of growth.
    text = "".join(case["text"] + " and so on.\n" for case in GOLDEN["cases"] if case["ids"])
    text *= 1_000_000 // len(text)
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 10
    assert len(ids) > 100_000
