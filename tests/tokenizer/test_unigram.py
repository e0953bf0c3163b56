"""Vocabularies of XLM-RoBERTa's kind: ids recorded from llama.cpp, the definition, the library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from edgeh2o.tokenizer._unigram import TextRewriter
from tests.tokenizer.unigram_vocabulary import (
    NORMAL,
    OWN,
    UNUSED_TEXT,
    WAYS,
    WORDS,
    best_total,
    charsmap,
    make_unigram_metadata,
    replacements,
    rewrite_slowly,
    unigram_library,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_unigram.json").read_text("ascii"))
METADATA = make_unigram_metadata()
TOKENIZER = build_tokenizer(METADATA)
LIBRARY = unigram_library(METADATA)
TOKENS = TOKENIZER.vocabulary.tokens
FIRST, LAST, UNKNOWN = 0, 2, 3
SCORES = {
    text: score
    for text, score, kind in zip(
        TOKENS,
        np.asarray(METADATA["tokenizer.ggml.scores"]).tolist(),
        TOKENIZER.vocabulary.types,
        strict=True,
    )
    if kind == NORMAL
}
UNKNOWN_SCORE = min(SCORES.values()) - 10.0
BARE = build_tokenizer(
    make_unigram_metadata(
        precompiled_charsmap=None, add_space_prefix=False, remove_extra_whitespaces=False
    )
)
CHARSMAP = charsmap()

words_and_noise = st.lists(
    st.sampled_from([*(word.replace("\u2581", " ") for word in WORDS), *replacements(), " ", "\0"])
    | st.text(st.characters(exclude_categories=["Cs"]))
).map("".join)


def pieces_of(text: str, **changes: object) -> list[str]:
    tokenizer = build_tokenizer(make_unigram_metadata(**changes)) if changes else TOKENIZER
    return [TOKENS[i] for i in tokenizer.encode(text, add_special=False)]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_ids_are_those_of_llama_cpp(way: int) -> None:
    adds, joins = WAYS[way]
    metadata = make_unigram_metadata(add_space_prefix=adds, remove_extra_whitespaces=joins)
    tokenizer = build_tokenizer(metadata)
    assert len(GOLDEN["texts"]) > 100
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ways"][way], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids, text


def test_the_ways_differ_where_they_should() -> None:
    adds, joins, bare = (GOLDEN["ways"][WAYS.index(way)] for way in ((1, 0), (0, 1), (0, 0)))
    assert adds != joins != bare != adds


@given(words_and_noise)
def test_texts_are_rewritten_by_the_longest_that_the_table_has(text: str) -> None:
    rewriter = TextRewriter(CHARSMAP, adds_blank=True, joins_blanks=True)
    assert rewriter.rewrite(text.encode("utf-8")).decode("utf-8") == rewrite_slowly(text)


@given(st.text("\u2581thenoaworld12,\u4e2d\u6587\u00e9\u0416", max_size=10))
def test_the_choice_follows_the_definition(text: str) -> None:
    """In a vocabulary without a table or blanks of its own; unknown neighbours are one token."""
    ids = BARE.encode(text, add_special=False)
    total, rest = 0.0, text
    for token_id in ids:
        if token_id == UNKNOWN:
            length = next((i for i, c in enumerate(rest) if c in SCORES), len(rest))
            total, rest = total + length * UNKNOWN_SCORE, rest[length:]
        else:
            piece = TOKENS[token_id]
            assert rest.startswith(piece)
            total, rest = total + SCORES[piece], rest[len(piece) :]
    assert not rest and total == (best_total(text, SCORES, UNKNOWN_SCORE) if text else 0.0)


@given(st.lists(st.sampled_from(WORDS) | st.text("helotwrd \u0416\u4e2d\u00e9,12")).map("".join))
def test_ids_are_those_of_the_library(text: str) -> None:
    # It takes U+2581 in a text for one that it has written, and cuts there.
    text = text.replace("\u2581", " ")
    assert (
        TOKENIZER.encode(text, add_special=False)
        == LIBRARY.encode(text, add_special_tokens=False).ids
    )


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_has_ids(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == FIRST and ids[-1] == LAST and TOKENIZER.count_at_least(text) <= len(ids)
    assert not {FIRST, LAST} & set(ids[1:-1])
    TOKENIZER.decode(ids)


def test_blanks() -> None:
    words = ["\u2581the", "\u2581then"]
    assert pieces_of("the then") == pieces_of(" the \n\u3000then\t") == words
    assert pieces_of("") == pieces_of(" \n\u200b") == []
    assert pieces_of("the  the", remove_extra_whitespaces=False) == [
        *("\u2581the", "\u2581", "\u2581the")
    ]
    assert pieces_of("the", add_space_prefix=False)[0] == "\u2581the"  # by joining them
    bare = {"add_space_prefix": False, "remove_extra_whitespaces": False}
    assert "\u2581" not in "".join(pieces_of("the", **bare))
    goes_on = TOKENIZER.encode("the the", add_special=False, before="x")
    assert "".join(TOKENS[i] for i in goes_on) == "the\u2581the"
    assert TOKENIZER.encode(" the", add_special=False, before="x") == [TOKENS.index("\u2581the")]


def test_characters_become_what_the_table_says() -> None:
    assert pieces_of("\uff34\uff28\uff25") == pieces_of("THE")
    assert pieces_of("cafe\u0301") == pieces_of("caf\u00e9")
    assert pieces_of("the\u00ad\u200bn") == pieces_of("then")
    assert pieces_of("\U0001f600\U0001f601") == ["\u2581", "<unk>"]


def test_what_a_file_says() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.space_prefix) == (FIRST, LAST, True)
    assert TOKENIZER.model_name == "t5" and LAST in TOKENIZER.eog_ids
    assert TOKENIZER.encode("the") == [FIRST, TOKENS.index("\u2581the"), LAST]
    # T5's, where it says nothing.
    changes = {f"{name}_token_id": None for name in ("bos", "eos", "unknown")}
    changes |= {"add_bos_token": None, "add_eos_token": None}
    silent = build_tokenizer(make_unigram_metadata(**changes))
    assert silent.encode("\u0416") == [TOKENS.index("\u2581"), 2, 1]


def test_pairs_of_texts() -> None:
    the, then = TOKENS.index("\u2581the"), TOKENS.index("\u2581then")
    both = build_tokenizer(make_unigram_metadata(add_sep_token=True))
    assert both.encode_pair("the", "then") == [FIRST, the, LAST, LAST, then, LAST]
    assert TOKENIZER.encode_pair("the", "then") == [FIRST, the, LAST, then, LAST]
    assert both.encode_pair("the</s>", "").count(LAST) == 3  # as text
    # A separator that a file asks for and does not name is left out.
    nameless = build_tokenizer(make_unigram_metadata(add_sep_token=True, seperator_token_id=None))
    assert nameless.encode_pair("the", "then") == TOKENIZER.encode_pair("the", "then")


def test_what_text_does_not_become() -> None:
    for text in ("</s>", UNUSED_TEXT):
        assert TOKENS.index(text) not in TOKENIZER.encode(text, add_special=False)
    assert TOKENIZER.encode("</s>", add_special=False, parse_special=True) == [LAST]
    assert TOKENIZER.encode(f"the{OWN}", add_special=False)[-1] == TOKENS.index(OWN)


def test_long_texts_without_blanks() -> None:
    """Every place is looked at once; neighbours that are unknown are one token."""
    n = 1 << 20
    assert TOKENIZER.encode("\U0001f600" * (n // 4), add_special=False) == [
        *(TOKENS.index("\u2581"), UNKNOWN)
    ]
    ids = TOKENIZER.encode("a" * n, add_special=False)
    assert sum(len(TOKENS[i]) for i in ids) == n + 1


def test_text_comes_back_as_it_was_rewritten() -> None:
    ids = TOKENIZER.encode("  The\u3000\uff34hen, caf\u00e9")
    assert TOKENIZER.decode(ids, skip_special=True) == "he hen, caf\u00e9"
    decoder = TOKENIZER.decoder(skip_special=True)
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == "he hen, caf\u00e9"


def cut_charsmap(at: int, new: bytes = b"") -> np.ndarray:
    return np.frombuffer(CHARSMAP[:at] + new, np.uint8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": None}, r"the key tokenizer\.ggml\.scores is missing"),
        ({"unknown_token_id": -1, "tokens": ("a", "b")}, r"unknown_token_id names no token"),
        ({"precompiled_charsmap": "x"}, "must be an array of bytes, not str"),
        ({"precompiled_charsmap": np.zeros(8, np.int32)}, "must be an array of bytes, not int32"),
        ({"precompiled_charsmap": cut_charsmap(0)}, "is damaged: it is empty"),
        ({"precompiled_charsmap": cut_charsmap(3)}, "is damaged: its table of .* does not fit"),
        ({"precompiled_charsmap": cut_charsmap(400)}, "is damaged: its table of .* does not fit"),
        ({"precompiled_charsmap": cut_charsmap(-1)}, "its last replacement does not end"),
        ({"precompiled_charsmap": cut_charsmap(-2, b"\xff\0")}, "its replacements are not UTF-8"),
        ({"add_space_prefix": 1}, r"add_space_prefix must be true or false"),
    ],
)
def test_malformed_vocabularies(changes: dict[str, object], problem: str) -> None:
    if "tokens" in changes:
        changes = {**changes, "scores": np.zeros(2, np.float32), "token_type": None}
    with pytest.raises(FormatError, match=problem):
        build_tokenizer(make_unigram_metadata(**changes))


def test_damaged_tables_are_refused_or_read(seed: int = 11) -> None:
    """Of one changed entry: an error that names the key, or text that has ids."""
    source, refused = np.random.default_rng(seed), 0
    for _ in range(60):
        damaged = np.frombuffer(CHARSMAP, np.uint8).copy()
        damaged[source.integers(4, len(damaged), 40)] = source.integers(0, 256, 40)
        try:
            tokenizer = build_tokenizer(make_unigram_metadata(precompiled_charsmap=damaged))
        except FormatError as error:
            assert "precompiled_charsmap is damaged" in str(error)
            refused += 1
        else:
            tokenizer.decode(tokenizer.encode("".join(replacements())))
    assert refused > 0
