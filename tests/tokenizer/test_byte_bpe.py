"""Encoding and decoding with a small byte-level BPE vocabulary."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError, UsageError
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from edgeh2o.tokenizer.pre_tokenizers import MAX_RUN_LENGTH, PIECE_LENGTH
from tests.tokenizer.vocabularies import (
    SPECIAL,
    byte_characters,
    make_metadata,
    merge_slowly,
)

METADATA = make_metadata()
TOKENIZER = build_tokenizer(METADATA)
FIRST_SPECIAL = TOKENIZER.vocab_size - len(SPECIAL)
BOS, EOS, NOTE, NOTES, UNK = range(FIRST_SPECIAL, TOKENIZER.vocab_size)

any_text = st.text(st.characters(exclude_categories=["Cs"]))
words_and_noise = st.lists(
    st.sampled_from(
        ["hello", " help", "then", "12", "\u4e2d\u6587", "\n", "  ", "<|note|>", "<|begin|>", "\0"]
    )
    | any_text
).map("".join)


def texts_of(ids: list[int]) -> list[str]:
    return [TOKENIZER.token_text(token_id) for token_id in ids]


@given(words_and_noise)
def test_decoding_undoes_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special=False)) == text
    special = TOKENIZER.encode(text, add_special=False, parse_special=True)
    assert TOKENIZER.decode(special) == text


@given(st.text("helopwrdtna ", max_size=40))
def test_merging_follows_the_definition(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special=False)
    assert texts_of(ids) == merge_slowly(text, METADATA)


def test_cutting_long_text_keeps_the_ids() -> None:
    line = "hello world, then the other 12\n"
    ids = TOKENIZER.encode(line, add_special=False)
    assert len(line) * 2000 > 2 * PIECE_LENGTH
    assert TOKENIZER.encode(line * 2000, add_special=False) == ids * 2000


def test_known_ids() -> None:
    assert texts_of(TOKENIZER.encode("hello world", add_special=False)) == ["hello", "\u0120world"]
    assert texts_of(TOKENIZER.encode("thenother", add_special=False)) == ["then", "o", "the", "r"]
    assert TOKENIZER.encode("", add_special=False) == []
    assert TOKENIZER.encode("\0", add_special=False) == [0]


def test_control_tokens_are_text_unless_asked_for() -> None:
    text = "<|begin|>hello<|note|>"
    plain = TOKENIZER.encode(text, add_special=False)
    assert BOS not in plain
    assert plain[-2:] == [TOKENIZER.encode("hello", add_special=False)[0], NOTE]
    parsed = TOKENIZER.encode(text, add_special=False, parse_special=True)
    assert parsed == [BOS, *TOKENIZER.encode("hello", add_special=False), NOTE]


def test_the_longest_special_token_wins() -> None:
    assert TOKENIZER.encode("<|note|>s", add_special=False, parse_special=True) == [NOTES]
    assert TOKENIZER.encode("<|note|>s", add_special=False)[0] == NOTE
    assert TOKENIZER.encode("<unk>", add_special=False, parse_special=True) == [UNK]


def test_special_tokens_are_shown_or_skipped() -> None:
    ids = [BOS, *TOKENIZER.encode("hello", add_special=False), NOTE, UNK, EOS]
    assert TOKENIZER.decode(ids) == "<|begin|>hello<|note|><unk><|end_of_text|>"
    assert TOKENIZER.decode(ids, skip_special=True) == "hello<|note|>"


@cache
def build_with_flags(add_bos: bool | None, add_eos: bool | None, pre: str) -> Tokenizer:
    return build_tokenizer(make_metadata(pre=pre, add_bos_token=add_bos, add_eos_token=add_eos))


@pytest.mark.parametrize("add_bos", [False, True, None])
@pytest.mark.parametrize("add_eos", [False, True, None])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken"])
@given(text=any_text)
def test_bos_and_eos(add_bos: bool | None, add_eos: bool | None, pre: str, text: str) -> None:
    tokenizer = build_with_flags(add_bos, add_eos, pre)
    begins = add_bos if add_bos is not None else pre != "gpt-2"
    plain = tokenizer.encode(text, add_special=False)
    expected = [BOS] * begins + plain + [EOS] * bool(add_eos)
    assert tokenizer.encode(text) == expected
    assert (tokenizer.add_bos, tokenizer.add_eos) == (begins, bool(add_eos))


def test_a_second_bos_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer(make_metadata(add_bos_token=True))
    assert tokenizer.encode("<|begin|>a", parse_special=True)[:2] == [BOS, BOS]
    assert "begins with a BOS token" in caplog.text


def test_ignore_merges_takes_a_whole_word() -> None:
    tokens = [*byte_characters(), "<s>", "ab", "abc"]
    metadata = make_metadata(
        pre="llama-bpe", tokens=tokens, token_type=None, merges=["a b"], bos_token_id=256
    )
    # "abc" cannot be reached by merges.
    assert build_tokenizer(metadata).encode("abc", add_special=False) == [258]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert build_tokenizer(metadata).encode("abc", add_special=False) == [257, ord("c") - 0x21 + 33]


def test_bytes_without_a_token_vanish_but_part_their_neighbours() -> None:
    lacking = byte_characters()[4]
    tokenizer = build_tokenizer(make_metadata(without=[lacking]))
    ids = tokenizer.encode("hel\x04lo", add_special=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["hel", "l", "o"]
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


def test_types_decide_how_a_token_is_spelled() -> None:
    tokens = [*byte_characters(), "<0x0A>", "\u0120raw", "[PAD]", "\U0001f600"]
    types = METADATA["tokenizer.ggml.token_type"][:260].copy()
    types[256:] = [6, 4, 5, 1]
    tokenizer = build_tokenizer(make_metadata(tokens=tokens, token_type=types, merges=[]))
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(256, 260)]
    # "[PAD]" marks a filler and counts as a control token whatever its type says.
    assert spelled == [b"\n", "\u0120raw".encode(), b"[PAD]", "\U0001f600".encode()]
    assert tokenizer.token_bytes(258, skip_special=True) == b""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lone surrogate, U\+D83D, at character 2"):
        TOKENIZER.encode("ab\ud83d")


def test_a_run_that_cannot_be_cut_is_bounded() -> None:
    with pytest.raises(UsageError, match="no word that a blank"):
        TOKENIZER.encode("a" * (MAX_RUN_LENGTH + 1))


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(UsageError, match=f"token id {token_id} is outside"):
        TOKENIZER.decode([token_id])
    with pytest.raises(UsageError, match="outside the vocabulary"):
        TOKENIZER.token_text(token_id)


def test_a_long_word_takes_no_quadratic_time() -> None:
    # 300,000 characters: about 0.2 s when linear, minutes when every merge scans the word.
    assert len(TOKENIZER.encode("a" * 300_000, add_special=False)) == 150_000


def test_importing_is_light() -> None:
    heavy = "('numpy', 'tokenizers')"
    code = f"import sys, edgeh2o.tokenizer; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "tokenizer.ggml.model is missing"),
        (3, "must be a string"),
        ("whitespace", "'whitespace' .*BPE on words.* not supported yet"),
        ("gpt3", "unknown tokenizer model 'gpt3'; supported: bert, gemma4, gpt2, llama"),
    ],
)
def test_the_model_must_be_known(model: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build_tokenizer(make_metadata(model=model))
