"""The table of pre-tokenizers: words as llama.cpp cuts them, and cuts that change nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.errors import FormatError, UsageError
from edgeh2o.tokenizer import build_tokenizer
from edgeh2o.tokenizer.pre_tokenizers import (
    MAX_RUN_LENGTH,
    cut_text,
    find_pre_tokenizer,
    pre_tokenizer_names,
)
from tests.tokenizer.vocabularies import make_metadata

GOLDEN = json.loads((Path(__file__).parent / "golden_words.json").read_text("ascii"))
SPLITS = {
    (name, case["text"]): split["words"]
    for case in GOLDEN["cases"]
    for split in case["splits"]
    for name in split["names"].split()
}
BUILT = {find_pre_tokenizer(name).patterns: name for name in pre_tokenizer_names()}
SPLITTERS = {name: find_pre_tokenizer(name).build() for name in BUILT.values()}


def split(name: str, text: str) -> list[str]:
    splitter = SPLITTERS[BUILT[find_pre_tokenizer(name).patterns]]
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


# Where the published rules and llama.cpp part ways: the text, the names, the published words.
CASE_TEXT = "aB  \r\n \n\x01\u0661\u0662\u0663\u0664 e"
HANGUL_TEXT = "\ud55c\uff01\u2026\u4e2d\u3105 \u2019sA"
NUMBER_TEXT = "a!!\u0301 b  12"
LINES, GROUPED = "  \r\n \n", ["\u0661", "\u0662\u0663\u0664", " e"]
PUBLISHED = {
    # llama.cpp does not tell the case of letters apart here.
    ("youtu", CASE_TEXT): ["a", "B", LINES, "\x01", *"\u0661\u0662\u0663\u0664", " e"],
    ("youtu", HANGUL_TEXT): ["\ud55c", "\uff01\u2026", "\u4e2d", "\u3105", " ", "\u2019", "s", "A"],
    ("kimi-k2", CASE_TEXT): ["a", "B", LINES, "\x01", "\u0661\u0662\u0663", "\u0664", " e"],
    ("kimi-k2", HANGUL_TEXT): ["\ud55c", "\uff01\u2026", "\u4e2d", "\u3105", " \u2019", "s", "A"],
    # Nor here, and it joins the text before a number to the one or two digits that begin it.
    **{
        (name, text): words
        for name in ("tiny_aya", "cohere2moe")
        for text, words in (
            (CASE_TEXT, ["a", "B", LINES, "\x01", *GROUPED]),
            (HANGUL_TEXT, ["\ud55c", "\uff01\u2026", "\u4e2d\u3105", " \u2019", "s", "A"]),
            (NUMBER_TEXT, ["a", "!!\u0301", " b", "  ", "12"]),
        )
    },
    ("afmoe", CASE_TEXT): ["aB", LINES, "\x01", *GROUPED],
    ("afmoe", NUMBER_TEXT): ["a", "!!", "\u0301", " b", "  ", "12"],
    # It groups ASCII digits only.
    ("superbpe", CASE_TEXT): [f"aB{LINES}\x01", *GROUPED],
}


@pytest.mark.parametrize("name", pre_tokenizer_names())
def test_words_are_those_of_llama_cpp(name: str) -> None:
    for case in GOLDEN["cases"]:
        recorded = SPLITS[name, case["text"]]
        published = PUBLISHED.get((name, case["text"]))
        assert published != recorded
        assert split(name, case["text"]) == (published or recorded)


def test_the_golden_words_tell_the_rules_apart() -> None:
    texts = [case["text"] for case in GOLDEN["cases"]]
    outcomes = [[SPLITS[name, text] for text in texts] for name in BUILT.values()]
    same = [pair for i, pair in enumerate(outcomes) if pair in outcomes[:i]]
    assert not same


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        # Case and combining marks outside ASCII, which llama.cpp does not tell apart.
        (
            "gpt-4o",
            "\u043f\u0440\u0418\u0412\u0435\u0442",
            ["\u043f\u0440", "\u0418\u0412\u0435\u0442"],
        ),
        (
            "tekken",
            "\u043f\u0440\u0418\u0412\u0435\u0442",
            ["\u043f\u0440", "\u0418\u0412\u0435\u0442"],
        ),
        ("gpt-4o", "n\u0303o a'LLx", ["n\u0303o", " a'LL", "x"]),
        ("tekken", "fooBar'll", ["foo", "Bar", "'ll"]),
        # Only ASCII letters make a contraction: U+017F is a lower-case s by case folding.
        ("llama-bpe", "a'\u017f", ["a", "'\u017f"]),
    ],
)
def test_words_beyond_llama_cpp(name: str, text: str, words: list[str]) -> None:
    assert split(name, text) == words


BLANKS = (" ", "  ", "\t", "\n", "\r\n", "\u3000", "\xa0", "\x1c", "\u2028")

LETTERS = (
    "ab",
    "C",
    "don't",
    "\u00e9",
    "e\u0301",
    "\u0436",
    "\ud55c",
    "\u4e2d\u6587\u3002\u3001",
    "\u0928\u094d",
)


@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from(
            (
                *LETTERS,
                *BLANKS,
                "1",
                "234",
                ".",
                "!/",
                "-",
                "_",
                "'",
                '"',
                "`",
                "<",
                "(",
                "\u0378",
                "\u0633\u0644",
            )
        ),
        max_size=30,
    ).map("".join)
)
def test_cuts_keep_the_words(text: str) -> None:
    for name in SPLITTERS:
        cut_point = find_pre_tokenizer(name).cut_point
        pieces = list(cut_text(text, cut_point=cut_point, piece_length=1))
        assert "".join(pieces) == text
        assert [word for piece in pieces for word in split(name, piece)] == split(name, text)


def test_pieces_have_the_length_asked_for() -> None:
    pieces = list(cut_text("word " * 1000, piece_length=100))
    assert all(100 <= len(piece) <= 105 for piece in pieces[:-1])
    for sentence in ("\u4e2d\u6587\u3002", "\u0633\u0644\u0627\u0645 ", "\u0928\u092e "):
        assert max(map(len, cut_text(sentence * 1000, piece_length=100))) <= 105


def test_the_longest_run_is_still_accepted() -> None:
    run = "a" * MAX_RUN_LENGTH
    assert list(cut_text(run)) == [run]
    with pytest.raises(UsageError, match="no word that a blank"):
        list(cut_text(run + "a"))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(FormatError, match="unknown pre-tokenizer 'smol'"):
        find_pre_tokenizer("smol")
    with pytest.raises(FormatError, match=r"'whitespace' .* is not supported; use another model"):
        find_pre_tokenizer("whitespace")
    with pytest.raises(FormatError, match="must be a string, not int"):
        build_tokenizer(make_metadata(pre=3))


@pytest.mark.parametrize("pre", [None, ""])
def test_a_missing_name_is_reported(pre: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = build_tokenizer(make_metadata(pre=pre))
    assert tokenizer.pre_name == "default"
    assert "does not name its pre-tokenizer" in caplog.text
