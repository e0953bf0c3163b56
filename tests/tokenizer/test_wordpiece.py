"""BERT's vocabularies: ids recorded from llama.cpp, the definition, what a file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.wordpiece_vocabulary import (
    TOKENS,
    longest_pieces,
    make_wordpiece_metadata,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_wordpiece.json").read_text("ascii"))
METADATA = make_wordpiece_metadata()
TOKENIZER = build_tokenizer(METADATA)
UNKNOWN, FIRST, LAST = (TOKENS.index(text) for text in ("[UNK]", "[CLS]", "[SEP]"))


def pieces_of(text: str, **changes: object) -> list[str]:
    tokenizer = build_tokenizer(make_wordpiece_metadata(**changes))
    return [TOKENS[i] for i in tokenizer.encode(text, add_special=False)]


def test_ids_are_those_of_llama_cpp() -> None:
    assert len(GOLDEN["texts"]) > 100
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True):
        assert TOKENIZER.encode(text, add_special=False, parse_special=True) == ids, text


@given(st.lists(st.text("abcthequickls0\u00df\u4e2e", min_size=1, max_size=8), max_size=6))
def test_pieces_follow_the_definition(words: list[str]) -> None:
    expected: list[str] = []
    for word in words:
        if "\u4e2e" in word:  # a word of its own, and no piece
            return
        expected += longest_pieces(word) or ["[UNK]"]
    assert pieces_of(" ".join(words)) == expected


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_has_ids(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == FIRST and ids[-1] == LAST and TOKENIZER.count_at_least(text) <= len(ids)
    assert not {FIRST, LAST} & set(ids[1:-1])
    TOKENIZER.decode(ids)


def test_texts_are_cleaned() -> None:
    assert pieces_of("The THING\t it\u00a0is\r\n") == [
        *("\u2581the", "\u2581thing", "\u2581it", "\u2581is")
    ]
    assert pieces_of("t\u0301h\u00e9") == ["\u2581the"]
    assert pieces_of("it\u200bis\u0000\ufffd") == pieces_of("itis")  # control characters go
    assert pieces_of("it,is") == ["\u2581it", "\u2581,", "\u2581is"]
    assert pieces_of("it\u4e2dis") == ["\u2581it", "\u2581\u4e2d", "\u2581is"]
    assert pieces_of("\u226e") == ["\u2581<"]  # whose parts are a sign and a mark
    assert pieces_of("\u0130t") == ["\u2581it"]
    assert pieces_of("the \u0436") == ["\u2581the", "[UNK]"]
    assert pieces_of("the\u0436") == ["[UNK]"]
    assert pieces_of("") == pieces_of(" \n") == []


def test_what_a_file_says() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (FIRST, LAST)
    assert TOKENIZER.model_name == "bert" and LAST in TOKENIZER.eog_ids
    assert TOKENIZER.encode("the") == [FIRST, TOKENS.index("\u2581the"), LAST]
    # Whatever else it says: texts of BERT have both.
    silent = build_tokenizer(make_wordpiece_metadata(add_bos_token=False, add_eos_token=False))
    assert silent.encode("the") == TOKENIZER.encode("the")
    keeps = {"normalizer.lowercase": False}
    assert pieces_of("Caps caf\u00e9", **keeps) == ["\u2581Caps", "\u2581caf\u00e9"]
    assert pieces_of("The", **keeps) == ["[UNK]"]
    accents = {"normalizer.strip_accents": False}
    assert pieces_of("CAF\u00c9", **accents) == ["\u2581caf\u00e9"]
    assert pieces_of("CAF\u00c9") == ["\u2581c", "a", "f", "e"]


@pytest.mark.parametrize(
    ("changes", "n_between"),
    [
        ({}, 1),  # of files that say nothing
        ({"add_eos_token": True, "add_sep_token": False}, 1),  # of later converters
        ({"add_eos_token": True, "add_sep_token": True}, 2),
        ({"add_sep_token": False}, 0),
    ],
)
def test_pairs_of_texts(changes: dict[str, object], n_between: int) -> None:
    tokenizer = build_tokenizer(make_wordpiece_metadata(**changes))
    the, fox = TOKENS.index("\u2581the"), TOKENS.index("\u2581fox")
    assert tokenizer.encode_pair("the", "FOX") == [FIRST, the, *[LAST] * n_between, fox, LAST]
    assert tokenizer.encode_pair("[SEP]", "the").count(LAST) == n_between + 1  # as text


def test_what_text_does_not_become() -> None:
    assert FIRST not in TOKENIZER.encode("[CLS]", add_special=False)
    assert TOKENIZER.encode("[CLS]", add_special=False, parse_special=True) == [FIRST]
    assert TOKENS.index("[unused1]") not in TOKENIZER.encode("[unused1]", parse_special=True)


def test_long_words_are_cut_in_time() -> None:
    """Without a blank: every place is looked at once."""
    ids = TOKENIZER.encode("a" * 10**5, add_special=False)
    assert len(ids) == 10**5 and ids[0] == TOKENS.index("\u2581a")
    assert TOKENIZER.encode("a" * 10**5 + "\u0436", add_special=False) == [UNKNOWN]


def test_text_comes_back_as_it_was_cleaned() -> None:
    ids = TOKENIZER.encode("The quick, brown THING!")
    assert TOKENIZER.decode(ids, skip_special=True) == "the quick , brown thing !"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": None}, r"the key tokenizer\.ggml\.tokens is missing"),
        ({"unknown_token_id": 9999}, r"tokenizer\.ggml\.unknown_token_id names no token"),
        ({"seperator_token_id": -1}, r"tokenizer\.ggml\.seperator_token_id names no token"),
        ({"bos_token_id": "x"}, r"tokenizer\.ggml\.bos_token_id must be an integer"),
        ({"normalizer.lowercase": 1}, r"normalizer\.lowercase must be true or false"),
    ],
)
def test_malformed_vocabularies(changes: dict[str, object], problem: str) -> None:
    changes = {"tokens": tuple(TOKENS[:60]), "token_type": None, **changes}
    with pytest.raises(FormatError, match=problem):
        build_tokenizer(make_wordpiece_metadata(**changes))
