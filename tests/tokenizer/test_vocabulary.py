"""Malformed vocabularies, and the ids that have a meaning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.vocabularies import SPECIAL, byte_characters, make_metadata

METADATA = make_metadata()
TOKENS: list[str] = list(METADATA["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
MERGES: list[str] = list(METADATA["tokenizer.ggml.merges"])  # type: ignore[call-overload]
N = len(TOKENS)


def replaced(texts: list[str], index: int, text: object) -> list[object]:
    return [*texts[:index], text, *texts[index + 1 :]]


def typed(index: int, kind: int, dtype: str = "int32") -> np.ndarray:
    types = np.ones(N, dtype=dtype)
    types[index] = kind
    return types


BAD: dict[str, tuple[dict[str, object], str]] = {
    "tokens missing": ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    "tokens empty": ({"tokens": []}, r"tokens is empty"),
    "tokens no array": ({"tokens": "abc"}, r"tokens must be an array of strings, not str"),
    "tokens numeric": ({"tokens": np.arange(9)}, r"tokens must be an array of strings"),
    "token no string": ({"tokens": replaced(TOKENS, 7, 5)}, r"tokens\[7\] must be a string"),
    "token repeated": (
        {"tokens": replaced(TOKENS, 9, TOKENS[270])},
        r"tokens\[270\] repeats the text of entry 9",
    ),
    "token of 1 MB": (
        {"tokens": replaced(TOKENS, 8, "x" * 1_000_000)},
        r"tokens\[8\] has 1000000 characters; at most 65536",
    ),
    "token not UTF-8": (
        {"tokens": replaced(TOKENS, N - 1, "a\udcff")},
        rf"tokens\[{N - 1}\] is not valid UTF-8",
    ),
    "types short": (
        {"token_type": np.ones(N - 1, dtype=np.int32)},
        rf"token_type ends at entry {N - 1}, but tokenizer.ggml.tokens has {N}",
    ),
    "types INT8": ({"token_type": typed(0, 1, "int8")}, r"token_type must be .*int32.*, not int8"),
    "types strings": ({"token_type": ["1"] * N}, r"token_type must be .*, not list"),
    "type unknown": ({"token_type": typed(5, 7)}, r"token_type\[5\] is 7"),
    "type negative": ({"token_type": typed(5, -1)}, r"token_type\[5\] is -1"),
    "scores short": ({"scores": np.zeros(3, dtype=np.float32)}, r"scores ends at entry 3"),
    "scores INT8": ({"scores": np.zeros(N, dtype=np.int8)}, r"scores must be .*, not int8"),
    "merges missing": ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
    "merge no string": ({"merges": replaced(MERGES, 2, None)}, r"merges\[2\] must be a string"),
    "merge without space": ({"merges": replaced(MERGES, 3, "ab")}, r"merges\[3\] is 'ab'"),
    "merge with two spaces": ({"merges": replaced(MERGES, 3, "a b c")}, r"merges\[3\] is 'a b c'"),
    "merge of one part": ({"merges": replaced(MERGES, 3, "a ")}, r"merges\[3\] is 'a '"),
    "merge of unknown part": (
        {"merges": replaced(MERGES, 4, "qq a")},
        r"merges\[4\] is 'qq a', but the vocabulary has no 'qq'",
    ),
    "merge to unknown token": (
        {"merges": replaced(MERGES, 4, "q z")},
        r"merges\[4\] .* has no 'qz'",
    ),
    "merge to a text longer than any": (
        {"merges": replaced(MERGES, 4, " ".join([max(TOKENS, key=len)] * 2))},
        r"merges\[4\] .* has no ",
    ),
    "merge with a lone surrogate": (
        {"merges": replaced(MERGES, 4, "a \ud800")},
        r"merges\[4\] .*has no '.*ud800'",
    ),
    "merge repeated": (
        {"merges": [*MERGES, MERGES[6]]},
        rf"merges\[{len(MERGES)}\] repeats entry 6",
    ),
    "bos no integer": ({"bos_token_id": "1"}, r"bos_token_id must be an integer, not '1'"),
    "eos true": ({"eos_token_id": True}, r"eos_token_id must be an integer, not True"),
    "add_bos no flag": ({"add_bos_token": 1}, r"add_bos_token must be true or false, not 1"),
    "bos wanted, none": (
        {"bos_token_id": None, "add_bos_token": True},
        r"every prompt needs a BOS token \(tokenizer.ggml.add_bos_token is true\)",
    ),
    "bos wanted by the rule": (
        {"bos_token_id": None, "pre": "llama-bpe"},
        r"every prompt needs a BOS token \(the pre-tokenizer asks for it\)",
    ),
    "bos wanted, out of range": (
        {"bos_token_id": N, "add_bos_token": True},
        r"bos_token_id names no token",
    ),
    "eos wanted, none": ({"eos_token_id": None, "add_eos_token": True}, r"needs a EOS token"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_metadata_is_refused(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(FormatError, match=message) as caught:
        build_tokenizer(make_metadata(**changes))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["<0x-1>", "<0xZZ>", "<0x0>", "<0x000>", "0x0A", "<0x>", ""])
def test_malformed_byte_tokens_are_refused(text: str) -> None:
    metadata = make_metadata(tokens=replaced(TOKENS, 1, text), token_type=typed(1, 6))
    with pytest.raises(FormatError, match=r"tokens\[1\] is of the byte type"):
        build_tokenizer(metadata)


def test_extra_types_are_ignored() -> None:
    tokenizer = build_tokenizer(make_metadata(token_type=np.ones(N + 5, dtype=np.int32)))
    assert tokenizer.vocab_size == N


def test_empty_texts_get_a_name(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer(make_metadata(tokens=replaced(TOKENS, N - 3, "")))
    assert tokenizer.token_text(N - 3) == f"[EMPTY_{N - 3}]"
    assert f"tokens[{N - 3}] is empty" in caplog.text


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "fim_sep"])
@pytest.mark.parametrize("value", [N, -1, 2**32 - 1])
def test_ids_out_of_range_are_ignored(
    name: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = build_tokenizer(make_metadata(**{f"{name}_token_id": value}))
    assert f"ignoring tokenizer.ggml.{name}_token_id = {value}" in caplog.text
    assert value not in {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.eog_ids}


def build_with_ends(
    texts: list[str], **changes: object
) -> tuple[Callable[[str], int], frozenset[int]]:
    """Build a vocabulary of bytes and ``texts``; return the id of a text and the ids that end."""
    tokens = [*byte_characters(), *texts]
    tokenizer = build_tokenizer(
        make_metadata(
            tokens=tokens,
            token_type=np.array([1] * 256 + [3] * len(texts), dtype=np.int32),
            merges=[],
            **{"bos_token_id": None, "eos_token_id": None} | changes,
        )
    )
    return tokens.index, tokenizer.eog_ids


def test_the_ids_of_the_file_end_a_generation() -> None:
    texts = ["<a>", "<b>", "<c>", "<d>", "<e>"]
    named = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258, "fim_pad_token_id": 259}
    _, ends = build_with_ends(texts, **named)
    assert ends == {256, 257, 258, 259}


def test_any_number_of_ids_may_end_a_generation(caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"<{letter}>" for letter in "abcdefgh"]
    for ids in ([256, 258, 260, 261, 262, 263], (256, 258, 260, 261, 262, 263)):
        for value in (ids, np.array(ids, np.uint32)):
            _, ends = build_with_ends(texts, eos_token_id=257, eog_token_ids=value)
            assert ends == {256, 257, 258, 260, 261, 262, 263}
    _, ends = build_with_ends(texts, eog_token_ids=[256, 264])
    assert ends == {256}
    assert "ignoring 264 of tokenizer.ggml.eog_token_ids" in caplog.text


@pytest.mark.parametrize("value", ["256", 256, [256, "257"], [True], [1.5], [[1]]])
def test_ids_that_end_are_integers(value: object) -> None:
    with pytest.raises(FormatError, match="eog_token_ids must be an array of integers, not"):
        build_with_ends(["<a>"], eog_token_ids=value)


def test_known_texts_end_a_generation() -> None:
    texts = ["<|im_end|>", "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<s>"]
    find, ends = build_with_ends(texts)
    assert ends == {find(text) for text in texts[:4]}


def test_only_the_first_repository_marker_ends() -> None:
    find, ends = build_with_ends(["<reponame>", "<REPO>", "<|fim_prefix|>"])
    assert ends == {find("<reponame>")}


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        (["<|return|>", "<|call|>"], "<|end|>"),
        (["<|flush|>", "<|calls|>"], "<|end|>"),
        (["<|tool_response>"], "</s>"),
    ],
)
def test_some_texts_end_only_on_their_own(others: list[str], kept: str) -> None:
    find, ends = build_with_ends([*others, kept])
    assert ends == {find(text) for text in others}
    _, alone = build_with_ends([kept])
    assert alone == {256}


def test_texts_with_a_meaning_keep_it_whatever_their_type() -> None:
    tokens = [*byte_characters(), "<|im_end|>", "<|fim_suffix|>", "<|channel|>"]
    types = np.array([1] * 256 + [1, 4, 3], dtype=np.int32)
    tokenizer = build_tokenizer(
        make_metadata(tokens=tokens, token_type=types, merges=[], bos_token_id=None)
    )
    text = "<|im_end|><|fim_suffix|><|channel|>"
    assert tokenizer.encode(text, parse_special=True) == [256, 257, 258]
    plain = tokenizer.encode(text)
    assert plain[-1] == 258
    assert not {256, 257} & set(plain)
    assert tokenizer.decode([256, 257, 258], skip_special=True) == "<|channel|>"


def test_types_may_be_missing() -> None:
    tokenizer = build_tokenizer(make_metadata(token_type=None))
    note = N - len(SPECIAL) + 2
    assert note not in tokenizer.encode("<|note|>", parse_special=True)
