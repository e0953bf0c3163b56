"""The merger of byte-pair vocabularies against that of ``tokenizers``, on random vocabularies."""

from __future__ import annotations

import random
import struct

import pytest
from tokenizers import Tokenizer, models

from edgeh2o.tokenizer._bpe import PairMerger

ALPHABET = "abcde\u0120\u4e00\U0001f600"


def make_vocabulary(seed: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of them in random order, most tokens made by several merges."""
    draw = random.Random(seed)
    tokens = list(ALPHABET[: draw.randint(3, len(ALPHABET))])
    merges: dict[str, None] = {}
    for _ in range(draw.randint(5, 60)):
        left, right = draw.choice(tokens), draw.choice(tokens)
        if len(left + right) <= 12:
            merges[f"{left} {right}"] = None
            if left + right not in tokens:
                tokens.append(left + right)
    shuffled = list(merges)
    draw.shuffle(shuffled)
    draw.shuffle(tokens)
    return tokens, shuffled


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_ids_are_those_of_the_library(seed: int, ignore_merges: bool) -> None:
    tokens, merges = make_vocabulary(seed)
    merger = PairMerger(tokens, merges, ignore_merges=ignore_merges)
    unknown_id = len(tokens)
    ids = {token: i for i, token in enumerate([*tokens, "unknown"])}
    pairs = [(left, right) for left, right in map(str.split, merges)]
    library = Tokenizer(models.BPE(ids, pairs, unk_token="unknown", ignore_merges=ignore_merges))
    draw = random.Random(seed)
    words = ["".join(draw.choices(ALPHABET + "?", k=draw.randint(1, 90))) for _ in range(40)]
    words += [*tokens, *words]  # the second time from the cache
    for word in words:
        expected = library.encode(word, add_special_tokens=False).ids
        assert merger.encode([word]) == [i for i in expected if i != unknown_id]
    assert merger.encode(words) == [i for word in words for i in merger.encode([word])]
    stored = PairMerger(tokens, as_stored(merges), ignore_merges=ignore_merges)
    assert stored.encode(words) == merger.encode(words)


def as_stored(texts: list[str]) -> bytes:
    """``texts`` as an array of a GGUF file holds them."""
    pieces = [text.encode() for text in texts]
    return b"".join(struct.pack("<Q", len(piece)) + piece for piece in pieces)


def test_no_words_and_no_merges() -> None:
    merger = PairMerger(["a", "b"], [])
    assert merger.encode([]) == merger.encode([""]) == []
    assert merger.encode(["ab?a"]) == [0, 1, 0]


def test_more_words_than_are_remembered() -> None:
    merger = PairMerger(["a", "b", "ab"], ["a b"])
    words = ["".join("ab"[n >> bit & 1] for bit in range(15)) for n in range(2**15)]
    assert merger.encode(words) == merger.encode(words)


@pytest.mark.parametrize(
    ("merges", "problem"),
    [
        (["ab"], "is no pair"),
        (["a b c"], "is no pair"),
        (["a  b"], "is no pair"),
        ([" a"], "known texts"),
        (["a "], "known texts"),
        ([""], "is no pair"),
        (["a z"], "known texts"),
        (["b a"], "known texts"),
        (["a b", "a b"], "repeats"),
    ],
)
def test_merges_that_are_none(merges: list[str], problem: str) -> None:
    for given in (merges, as_stored(merges)):
        with pytest.raises(ValueError, match=problem):
            PairMerger(["a", "b", "ab"], given)


@pytest.mark.parametrize("n_cut", [1, 3, 10])
def test_merges_that_are_cut_off(n_cut: int) -> None:
    with pytest.raises(ValueError, match="cut off"):
        PairMerger(["a", "b", "ab"], as_stored(["a b", "b a"])[:-n_cut])
    with pytest.raises(ValueError, match="cut off"):
        PairMerger(["a", "b"], struct.pack("<Q", 2**64 - n_cut))
