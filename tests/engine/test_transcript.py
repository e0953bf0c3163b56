"""Prompts that go on from what the cache holds keep its tokens; no others do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.engine.transcript import Transcript
from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.spm_vocabulary import make_spm_metadata

HIDDEN, END = 1, 2


class Characters:
    """A token for every character, and two that have no text."""

    eog_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: Any, *, skip_special: bool = False, continues: bool = False) -> str:
        assert skip_special and continues
        return "".join(chr(i) for i in ids if i > END)


CHARACTERS: Any = Characters()
TEXTS = st.text("ab ", max_size=5)
HIDDEN_TOKENS = st.lists(st.just(HIDDEN), max_size=2)


@given(first=TEXTS, said=TEXTS, hidden=HIDDEN_TOKENS, is_ended=st.booleans(), then=TEXTS)
def test_a_prompt_keeps_the_tokens_that_it_goes_on_from(
    first: str, said: str, hidden: list[int], is_ended: bool, then: str
) -> None:
    answer_ids = [*hidden, *CHARACTERS.encode(said)]
    transcript = Transcript(prompt=first, parse_special=True).with_prompt_ids(
        CHARACTERS.encode(first)
    )
    known = transcript.with_answer(said, [*answer_ids, *[END] * is_ended], CHARACTERS)

    def encode(text: str) -> list[int]:
        prompt = Transcript(prompt=text, parse_special=True)
        return known.encode(prompt, lambda begin: CHARACTERS.encode(text[begin:]))

    answered = answer_ids if said else []
    assert encode(first + said + then) == [
        *CHARACTERS.encode(first),
        *answered,
        *CHARACTERS.encode(then),
    ]
    # Asked once more, a prompt has its own tokens alone, whatever was answered.
    assert encode(first) == CHARACTERS.encode(first)


@pytest.mark.parametrize(
    ("first", "then", "is_kept"),
    [
        ("the thi", "ng", False),
        ("the ", "thing", False),
        ("the <|im_", "start|>", False),
        ("the thing", " is", True),
        ("the thing\n", "is", True),
        ("the thing\n", "\nis", True),
        ("the thing", "", True),
    ],
)
def test_a_prompt_keeps_its_tokens_where_a_word_ends(first: str, then: str, is_kept: bool) -> None:
    known = Transcript(prompt=first, parse_special=True).with_prompt_ids([1, 2])
    prompt = Transcript(prompt=first + then, parse_special=True)
    assert known.encode(prompt, lambda begin: [begin]) == ([1, 2, len(first)] if is_kept else [0])


def test_a_prompt_after_an_empty_one_has_one_bos() -> None:
    tokenizer = build_tokenizer(make_spm_metadata())
    empty = Transcript(prompt="", parse_special=True).with_prompt_ids(tokenizer.encode(""))
    known = empty.with_answer("the", tokenizer.encode("the", add_special=False), tokenizer)

    def encode(begin: int) -> list[int]:
        return tokenizer.encode("hello"[begin:], add_special=not begin)

    ids = tokenizer.encode("hello")
    assert ids[0] == tokenizer.bos_id
    for transcript in (empty, known):
        assert transcript.encode(Transcript(prompt="hello", parse_special=True), encode) == ids


def test_an_answer_keeps_the_blank_that_it_begins_with() -> None:
    tokenizer = build_tokenizer(make_spm_metadata())
    ids = tokenizer.encode("hello", add_special=False)
    transcript = Transcript(prompt="the", parse_special=True)
    assert transcript.with_answer(" hello", ids, tokenizer).answer_ids == tuple(ids)


def test_an_answer_that_is_not_its_tokens_text_is_left_out() -> None:
    transcript = Transcript(prompt="a", parse_special=True).with_prompt_ids([ord("a")])
    assert transcript.with_answer("b", CHARACTERS.encode("b stop"), CHARACTERS) is transcript
