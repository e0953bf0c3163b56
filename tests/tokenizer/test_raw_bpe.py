"""BPE on raw UTF-8 against its definition; ids like llama.cpp's in test_peer_vocabularies."""

from __future__ import annotations

import logging
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer, pre_tokenizer_names

BLANK = "\u2581"
CHARACTERS = (*"abct", BLANK, "\n", "\u4e2d")
MERGES = ("a b", "ab c", "\n \n", "\n\n \n", f"{BLANK} a", "c t", f"{BLANK} {BLANK}", "\u4e2d a")
# A token that merging never makes.
EXTRA = ("\n\n\n\n\n",)
LEFT_OUT = 0xB8


def make_metadata(**changes: object) -> dict[str, object]:
    """Bytes are tokens, but for ``LEFT_OUT``."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    plain = list(dict.fromkeys([*CHARACTERS, *merged, *EXTRA]))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256) if byte != LEFT_OUT]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "sarvam-moe",
        "tokens": [*plain, *byte_tokens, "<bos>", "<eos>"],
        "token_type": np.array([1] * len(plain) + [6] * 255 + [3, 3], np.int32),
        "merges": list(MERGES),
        "bos_token_id": len(plain) + 255,
        "eos_token_id": len(plain) + 256,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def encode_slowly(text: str, *, whole_line_ends: bool) -> list[str]:
    """Token texts by the definition: the first merge of the list that fits, the leftmost place."""
    metadata = make_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(MERGES)}
    texts: list[str] = []
    for word in re.findall(r"[^\n]+|\n+", text.replace(" ", BLANK)):
        if whole_line_ends and word[0] == "\n" and word in tokens:
            texts.append(word)
            continue
        parts = list(word)
        while pairs := [pair for pair in pairwise(parts) if pair in rank]:
            best = min(pairs, key=rank.__getitem__)
            at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
            parts[at : at + 2] = ["".join(best)]
        for part in parts:
            if part in tokens:
                texts.append(part)
            else:
                texts += [f"<0x{b:02X}>" for b in part.encode() if b != LEFT_OUT]
    return texts


@pytest.mark.parametrize("pre", ["gemma4", "granite-embed-multi-311m", "sarvam-moe"])
@settings(max_examples=100)
@given(text=st.text(st.sampled_from("abct \n\u4e2d\u6587\u00b8\U0001f600\r\t<"), max_size=24))
def test_ids_are_those_of_the_definition(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(make_metadata(pre=pre))
    ids = tokenizer.encode(text, add_special=False)
    found = [tokenizer.token_text(token_id) for token_id in ids]
    assert found == encode_slowly(text, whole_line_ends=pre != "sarvam-moe")


def test_runs_of_line_ends() -> None:
    by_rule = build_tokenizer(make_metadata(pre="gemma4"))
    by_merges = build_tokenizer(make_metadata(pre="sarvam-moe"))
    text = "\n" * 5
    assert len(by_rule.encode(text, add_special=False)) == 1
    assert [by_merges.token_text(i) for i in by_merges.encode(text)] == ["\n\n", "\n\n\n"]


def test_text_survives() -> None:
    text = "a b  abc\n\n\u4e2d\U0001f600 ct"
    tokenizer = build_tokenizer(make_metadata())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_model_gemma4_needs_no_pre_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = build_tokenizer(make_metadata(model="gemma4", pre="", add_bos_token=False))
    assert (tokenizer.model_name, tokenizer.pre_name) == ("gemma4", "gemma4")
    assert "asks for no BOS token, but 'gemma4' needs one" in caplog.text
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "<bos>"


def test_bad_vocabularies_are_refused() -> None:
    with pytest.raises(FormatError, match=r"merges\[1\] is 'a q', but the vocabulary has no 'q'"):
        build_tokenizer(make_metadata(merges=["a b", "a q"]))
    with pytest.raises(FormatError, match=r"bos_token_id names no token"):
        build_tokenizer(make_metadata(pre="gemma4", bos_token_id=10**6))


def test_names_are_listed() -> None:
    assert {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "llama-bpe"} <= set(
        pre_tokenizer_names()
    )
