"""Decoding id by id gives what decoding all ids gives, and never part of a character."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.vocabularies import byte_characters, make_metadata

TOKENIZER = build_tokenizer(make_metadata())
BYTE_IDS = {byte: i for i, byte in enumerate(range(256))}


def ids_of_bytes(data: bytes) -> list[int]:
    assert [TOKENIZER.token_text(i) for i in range(256)] == byte_characters()
    return [BYTE_IDS[byte] for byte in data]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
@example(ids_of_bytes(b"\xf0\x9f\x98"), False)
@example(ids_of_bytes(b"\xe4\xb8a\xff\xc3"), True)
def test_pieces_join_to_the_whole(ids: list[int], skip_special: bool) -> None:
    decoder = TOKENIZER.decoder(skip_special=skip_special)
    text = "".join(decoder.push(token_id) for token_id in ids) + decoder.finish()
    assert text == TOKENIZER.decode(ids, skip_special=skip_special)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_valid_text_never_shows_a_replacement(text: str) -> None:
    decoder = TOKENIZER.decoder()
    pieces = [decoder.push(token_id) for token_id in ids_of_bytes(text.encode("utf-8"))]
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_a_character_waits_for_its_last_byte() -> None:
    decoder = TOKENIZER.decoder()
    pieces = [decoder.push(token_id) for token_id in ids_of_bytes("\U0001f600!".encode())]
    assert pieces == ["", "", "", "\U0001f600", "!"]


def test_invalid_bytes_show_as_soon_as_they_are_certain() -> None:
    decoder = TOKENIZER.decoder()
    pieces = [decoder.push(token_id) for token_id in ids_of_bytes(b"\xff\xe4\xb8a\xc3")]
    assert pieces == ["\ufffd", "", "", "\ufffda", ""]
    assert decoder.finish() == "\ufffd"


def test_finish_makes_ready_for_another_text() -> None:
    decoder = TOKENIZER.decoder()
    decoder.push(BYTE_IDS[0xE4])
    assert decoder.finish() == "\ufffd"
    assert decoder.push(BYTE_IDS[0x61]) == "a"
    assert decoder.finish() == ""
