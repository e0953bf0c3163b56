"""PLaMo's vocabularies: ids recorded from llama.cpp, the definition, text and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from tests.tokenizer.plamo_vocabulary import UNUSED, WORDS, best_total, make_plamo_metadata

GOLDEN = json.loads((Path(__file__).parent / "golden_plamo2.json").read_text("ascii"))
METADATA = make_plamo_metadata()
TOKENIZER = build_tokenizer(METADATA)
TOKENS: list[str] = list(METADATA["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
BYTES = range(5, 261)


def test_ids_are_those_of_llama_cpp() -> None:
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True):
        assert TOKENIZER.encode(text, add_special=False, parse_special=True) == ids, text


@given(st.text("helotwrdan1 \u4e2d\u6587\u00e9", max_size=10))
def test_the_choice_follows_the_definition(text: str) -> None:
    scores = METADATA["tokenizer.ggml.scores"]
    assert isinstance(scores, np.ndarray)
    pieces = dict(zip(TOKENS[262:], scores[262:].tolist(), strict=True))
    taken = {piece: score for piece, score in pieces.items() if score > -2000.0}
    ids = TOKENIZER.encode(text, add_special=False)
    assert b"".join(TOKENIZER.token_bytes(i) for i in ids).decode() == text
    total, rest = 0.0, text
    while ids:
        if ids[0] in BYTES:
            del ids[: len(rest[0].encode())]
            rest, total = rest[1:], total - 1000.0
        else:
            piece = TOKENS[ids.pop(0)]
            rest, total = rest.removeprefix(piece), total + taken[piece]
    assert total == pytest.approx(best_total(text, taken), abs=1e-3)


@given(st.lists(st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]))))
def test_decoding_undoes_encoding(parts: list[str]) -> None:
    text = "".join(parts).removeprefix("\ufeff")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    ids = TOKENIZER.encode(text, add_special=False)
    decoder = TOKENIZER.decoder()
    assert "".join([*(decoder.push(i) for i in ids), decoder.finish()]) == text


def test_what_text_does_not_become() -> None:
    for text in ("<|plamo:eos|>", UNUSED, "<0x41>"):
        ids = TOKENIZER.encode(text, add_special=False)
        assert TOKENS.index(text) not in ids and TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode("<|plamo:op|>", add_special=False, parse_special=True) == [4]


def test_what_a_file_says() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.add_bos) == (1, 2, False)
    assert {2, 4} <= TOKENIZER.eog_ids
    assert TOKENIZER.model_name == "plamo2" and not TOKENIZER.space_prefix
    adds = build_tokenizer(make_plamo_metadata(add_bos_token=True))
    assert adds.encode("then")[0] == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": None}, r"the key tokenizer\.ggml\.scores is missing"),
        ({"tokens": TOKENS[:5] + TOKENS[6:]}, r"has no byte token <0x00>"),
    ],
)
def test_malformed_vocabularies(changes: dict[str, object], problem: str) -> None:
    metadata = make_plamo_metadata(**changes)
    if "tokens" in changes:
        for key in ("scores", "token_type"):
            values = metadata[f"tokenizer.ggml.{key}"]
            metadata[f"tokenizer.ggml.{key}"] = np.delete(np.asarray(values), 5)
    with pytest.raises(FormatError, match=problem):
        build_tokenizer(metadata)
