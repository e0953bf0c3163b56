"""SentencePiece vocabularies: ids recorded from llama.cpp, the definition, text and back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError, UsageError
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from tests.tokenizer.spm_vocabulary import USER_DEFINED, WORDS, make_spm_metadata, merge_slowly

GOLDEN = json.loads((Path(__file__).parent / "golden_spm.json").read_text("ascii"))
METADATA = make_spm_metadata()
TOKENIZER = build_tokenizer(METADATA)
BARE = build_tokenizer(make_spm_metadata(add_space_prefix=False))
TOKENS: list[str] = list(METADATA["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
UNKNOWN, BOS, EOS, USER, END, LAST_CONTROL = range(6)
BYTES = range(6, 262)
N = len(TOKENS)

words_and_noise = st.lists(
    st.sampled_from([*(word.replace("\u2581", " ") for word in WORDS), "<|user|>", "\0", "\n"])
    | st.text(st.characters(exclude_categories=["Cs"]))
).map("".join)


@pytest.mark.parametrize("variant", GOLDEN["variants"])
def test_ids_are_those_of_llama_cpp(variant: str) -> None:
    recorded = GOLDEN["variants"][variant]
    metadata = make_spm_metadata(add_space_prefix=recorded["add_space_prefix"])
    tokenizer = build_tokenizer({**metadata, "general.name": recorded["name"]})
    for text, ids in zip(GOLDEN["texts"], recorded["ids"], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids


def test_the_variants_differ() -> None:
    ids = [json.dumps(variant["ids"]) for variant in GOLDEN["variants"].values()]
    assert len(set(ids)) == len(ids)


@given(st.text("helotwrdna12\u4e2d\u6587\u00e9<>/s", max_size=30))
def test_merging_follows_the_definition(text: str) -> None:
    ids = BARE.encode(text, add_special=False)
    assert b"".join(BARE.token_bytes(i) for i in ids).decode() == text
    expected = [part for part in merge_slowly(text, METADATA) if part in TOKENS]
    assert [TOKENS[i] for i in ids if i not in BYTES] == expected


@given(words_and_noise)
def test_decoding_undoes_encoding(text: str) -> None:
    # U+2581 is how the vocabulary writes a blank.
    expected = text.replace("\u2581", " ")
    assert BARE.decode(BARE.encode(text), skip_special=True) == expected
    if not any(token in text for token in USER_DEFINED):  # a blank comes after those
        assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=True) == expected
    parsed = BARE.encode(text, add_special=False, parse_special=True)
    assert BARE.decode(parsed) == expected


@given(words_and_noise, words_and_noise)
def test_no_blank_goes_into_text_that_goes_on(before: str, text: str) -> None:
    ids = TOKENIZER.encode(before) + TOKENIZER.encode(text, add_special=False, before=before)
    if not any(token in before + text for token in USER_DEFINED):
        expected = (before + text).replace("\u2581", " ")
        assert TOKENIZER.decode(ids, skip_special=True) == expected


@pytest.mark.parametrize("parse_special", [False, True])
def test_after_a_special_token_text_begins_as_ever(parse_special: bool) -> None:
    before, text = "<|user|>", "hello"
    whole = TOKENIZER.encode(before + text, parse_special=parse_special)
    rest = TOKENIZER.encode(text, add_special=False, parse_special=parse_special, before=before)
    assert whole[-len(rest) :] == rest
    assert TOKENIZER.decode(rest, continues=True) == (" hello" if parse_special else "hello")


@given(st.lists(st.integers(0, N - 1)), st.booleans())
def test_pieces_join_to_the_whole(ids: list[int], skip_special: bool) -> None:
    decoder = TOKENIZER.decoder(skip_special=skip_special)
    for _ in range(2):
        text = "".join(map(decoder.push, ids)) + decoder.finish()
        assert text == TOKENIZER.decode(ids, skip_special=skip_special)


def test_the_first_blank_is_dropped_only_at_the_start() -> None:
    ids = TOKENIZER.encode("hello world", add_special=False)
    assert TOKENIZER.decode(ids) == "hello world"
    assert TOKENIZER.decode([BOS, *ids], skip_special=True) == "hello world"
    assert TOKENIZER.decode([BOS, *ids]) == "<s> hello world"
    assert TOKENIZER.decode(ids, continues=True) == " hello world"
    continuing = TOKENIZER.decoder(continues=True)
    assert "".join(map(continuing.push, ids)) == " hello world"
    assert BARE.decode(ids) == " hello world"


def test_bytes_wait_for_the_whole_character() -> None:
    ids = TOKENIZER.encode("\U0001f600", add_special=False)
    assert ids[1:] == [BYTES[byte] for byte in "\U0001f600".encode()]
    decoder = TOKENIZER.decoder()
    assert [decoder.push(token_id) for token_id in ids] == ["", "", "", "", "\U0001f600"]


@pytest.mark.parametrize("text", ["</s>", "<0x0A>", "<s>", "<|end|>", "<unk>"])
def test_text_never_grows_into_a_special_token(text: str) -> None:
    # All stretches of "</s>" and "<0x0A>" but the whole are pieces.
    ids = BARE.encode(text, add_special=False)
    assert not set(ids) & {*range(LAST_CONTROL + 1), BYTES[0x0A]}
    assert BARE.decode(ids) == text


def test_missing_keys_have_the_usual_meaning() -> None:
    names = ("bos", "eos", "unknown")
    tokenizer = build_tokenizer(make_spm_metadata(**{f"{name}_token_id": None for name in names}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eog_ids) == (
        1,
        2,
        {EOS, END, LAST_CONTROL},
    )
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.space_prefix) == (True, False, True)
    assert tokenizer.encode("") == [BOS]


def test_bytes_without_a_token_become_unknown() -> None:
    tokens = [f"byte {i}" if i in BYTES else text for i, text in enumerate(TOKENS)]
    types = np.where(np.isin(np.arange(N), list(BYTES)), 1, METADATA["tokenizer.ggml.token_type"])
    changes = {"tokens": tokens, "token_type": types.astype(np.int32)}
    tokenizer = build_tokenizer(make_spm_metadata(**changes))
    assert tokenizer.encode("\u0416", add_special=False)[-2:] == [UNKNOWN, UNKNOWN]
    assert tokenizer.encode("\nh", add_special=False)[-2] == UNKNOWN


@pytest.mark.parametrize("text", ["ab" * 200_000, " hello world" * 20_000, "\u0416" * 200_000])
def test_long_text_takes_no_quadratic_time(text: str) -> None:
    start = time.process_time()
    tokenizer_ids = TOKENIZER.encode("a" * 400_000 + text)
    assert time.process_time() - start < 10
    assert TOKENIZER.decode(tokenizer_ids[1:]) == "a" * 400_000 + text


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UsageError, match="lone surrogate"):
        TOKENIZER.encode("a\udc80")


def without_bytes() -> list[str]:
    return [f"byte {i}" if i in BYTES else text for i, text in enumerate(TOKENS)]


BAD: dict[str, tuple[dict[str, object], str]] = {
    "tokens missing": ({"tokens": None}, "tokens is missing"),
    "tokens empty": ({"tokens": []}, "tokens is empty"),
    "token repeated": ({"tokens": [*TOKENS[:-1], TOKENS[-2]]}, rf"tokens\[{N - 1}\] repeats"),
    "token of 1 MB": (
        {"tokens": [*TOKENS[:-1], "x" * 1_000_000]},
        rf"tokens\[{N - 1}\] has 1000000 characters",
    ),
    "scores missing": ({"scores": None}, r"the key tokenizer\.ggml\.scores is missing"),
    "scores short": ({"scores": np.zeros(N - 1, np.float32)}, rf"scores ends at entry {N - 1}"),
    "scores INT8": ({"scores": np.zeros(N, np.int8)}, "scores must be .*, not int8"),
    "scores no array": ({"scores": 1.5}, "scores must be an array .*, not float"),
    "scores strings": ({"scores": ["1"] * N}, "scores must be an array .*, not list"),
    "score NaN": ({"scores": np.full(N, np.nan, np.float32)}, r"scores\[0\] is not a number"),
    "types short": ({"token_type": np.ones(3, np.int32)}, "token_type ends at entry 3"),
    "types INT8": ({"token_type": np.ones(N, np.int8)}, "token_type must be .*, not int8"),
    "byte token <0x-1>": (
        {"tokens": [*TOKENS[:6], "<0x-1>", *TOKENS[7:]]},
        r"tokens\[6\] is of the byte type but reads '<0x-1>'",
    ),
    "byte token <0xZZ>": (
        {"tokens": [*TOKENS[:6], "<0xZZ>", *TOKENS[7:]]},
        r"tokens\[6\] is of the byte type but reads '<0xZZ>'",
    ),
    "bytes missing, no unknown": (
        {
            "tokens": without_bytes(),
            "token_type": np.ones(N, np.int32),
            "unknown_token_id": None,
        },
        "tokens has no byte token <0x00>, and .*unknown_token_id names no token",
    ),
    "unknown no integer": ({"unknown_token_id": "0"}, "unknown_token_id must be an integer"),
    "bos wanted, none": (
        {
            "tokens": ["<0x00>"],
            "token_type": None,
            "bos_token_id": 7,
            "eos_token_id": None,
        },
        "bos_token_id names no token",
    ),
    "space prefix no flag": ({"add_space_prefix": 1}, "add_space_prefix must be true or false"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_metadata_is_refused(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(FormatError, match=message) as caught:
        build_tokenizer(make_spm_metadata(**changes))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["bos", "eos", "unknown"])
def test_ids_out_of_range_give_way_to_the_usual_ones(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed: Tokenizer = build_tokenizer(make_spm_metadata(**{f"{name}_token_id": N}))
    assert f"ignoring tokenizer.ggml.{name}_token_id = {N}" in caplog.text
    assert (changed.bos_id, changed.eos_id) == (BOS, EOS)
