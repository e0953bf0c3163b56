"""tokenizer.json: what is written for a GGUF vocabulary is read back, with the same ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from edgeh2o.tokenizer._bpe import cut_json_merges
from edgeh2o.tokenizer.byte_bpe import to_byte_characters
from edgeh2o.tokenizer.gguf_vocabulary import vocabulary_metadata
from edgeh2o.tokenizer.json_bpe import read_plain_bpe
from edgeh2o.tokenizer.tokenizer_json import JsonTokenizer, TokenizerSettings, dump_tokenizer
from tests.tokenizer.spm_vocabulary import CONTROL, USER_DEFINED, WORDS, make_spm_metadata
from tests.tokenizer.vocabularies import make_metadata


def _spm_metadata(**changes: object) -> dict[str, object]:
    """Scores that are all different, as in files: tokenizer.json orders merges, ties it has not."""
    metadata = make_spm_metadata(**changes)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    rng = np.random.default_rng(0)
    metadata["tokenizer.ggml.scores"] = -rng.permutation(len(tokens)).astype(np.float32)
    return metadata


def _read_back(metadata: dict[str, object], **changes: Any) -> tuple[Tokenizer, JsonTokenizer]:
    tokenizer = build_tokenizer(metadata)
    files = dump_tokenizer(metadata, tokenizer, {})
    document = {**json.loads(files["tokenizer.json"]), **changes}
    settings = TokenizerSettings(
        vocab_size=len(tokenizer.vocabulary.tokens), bos=tokenizer.bos_id, eos=tokenizer.eos_id
    )
    return tokenizer, JsonTokenizer(json.dumps(document), settings)


PAIRS = {
    "SentencePiece": _read_back(_spm_metadata()),
    "SentencePiece without a blank in front": _read_back(_spm_metadata(add_space_prefix=False)),
    "byte-level BPE": _read_back(make_metadata()),
}
texts = st.lists(
    st.sampled_from([*(word.replace("\u2581", " ") for word in WORDS), *CONTROL, "\n", "  "])
    | st.text("helotwrdna12\u4e2d\u6587\u00e9 ", max_size=12)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
).map("".join)


@pytest.mark.parametrize("name", PAIRS)
@given(text=texts, parse_special=st.booleans())
def test_ids_are_those_of_the_file(name: str, text: str, parse_special: bool) -> None:
    tokenizer, read = PAIRS[name]
    ids = tokenizer.encode(text, parse_special=parse_special)
    assert read.encode(text, parse_special=parse_special) == ids
    assert read.decode(ids) == tokenizer.decode(ids)
    assert [read.token_bytes(i) for i in ids] == [tokenizer.token_bytes(i) for i in ids]


@pytest.mark.parametrize("name", PAIRS)
@given(before=texts, text=texts, parse_special=st.booleans())
def test_text_that_goes_on_has_the_ids_of_the_file(
    name: str, before: str, text: str, parse_special: bool
) -> None:
    tokenizer, read = PAIRS[name]
    how: dict[str, Any] = {"parse_special": parse_special, "before": before}
    assert read.encode(text, **how) == tokenizer.encode(text, **how)


@pytest.mark.parametrize("name", PAIRS)
def test_named_tokens_are_those_of_the_file(name: str) -> None:
    tokenizer, read = PAIRS[name]
    assert (read.bos_id, read.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert (read.add_bos, read.add_eos) == (tokenizer.add_bos, tokenizer.add_eos)
    assert tokenizer.eos_id in read.vocabulary.eog_ids


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(text=texts)
def test_metaspace(scheme: str, text: str) -> None:
    """How newer files write the blank in front: by the pre-tokenizer instead of a normalizer."""
    metadata = _spm_metadata(add_space_prefix=scheme != "never")
    tokenizer = build_tokenizer(metadata)
    document = json.loads(dump_tokenizer(metadata, tokenizer, {})["tokenizer.json"])
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": scheme,
        "split": False,
    }
    settings = TokenizerSettings(vocab_size=len(tokenizer.vocabulary.tokens), bos=1, eos=2)
    read = JsonTokenizer(json.dumps(document), settings)
    # The library adds no second blank to what begins with one, GGUF vocabularies do: to a text, and
    # to what follows a token that is found in it.
    found = any(token in text for token in (*CONTROL, *USER_DEFINED))
    if not found and not text.startswith((" ", "\u2581")):
        assert read.encode(text) == tokenizer.encode(text)
        assert read.encode(text, before="the") == tokenizer.encode(text, before="the")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "describes no tokenizer"),
        ('{"model": {"type": "BPE"}}', "cannot be used"),
        ("[" * 100000, "not JSON"),
    ],
)
def test_damaged_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        JsonTokenizer(text, TokenizerSettings(vocab_size=10))


def test_a_vocabulary_that_is_too_long_is_refused() -> None:
    metadata = _spm_metadata()
    document = dump_tokenizer(metadata, build_tokenizer(metadata), {})["tokenizer.json"]
    with pytest.raises(FormatError, match="belong to different models"):
        JsonTokenizer(document, TokenizerSettings(vocab_size=100))


@pytest.mark.parametrize("metadata", [_spm_metadata(), make_metadata()], ids=["pieces", "bytes"])
def test_a_special_token_that_the_model_lacks_is_plain_text(metadata: dict[str, object]) -> None:
    tokenizer = build_tokenizer(metadata)
    document = json.loads(dump_tokenizer(metadata, tokenizer, {})["tokenizer.json"])
    size = len(tokenizer.vocabulary)
    image = {
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        **{"id": size, "content": "<image>", "special": True},
    }

    def read(eos: int | str | None = tokenizer.eos_id, **changes: object) -> JsonTokenizer:
        tokens = [*document["added_tokens"], image | changes]
        settings = TokenizerSettings(vocab_size=size, eos=eos)
        return JsonTokenizer(json.dumps({**document, "added_tokens": tokens}), settings)

    for text in ("the <image> world", "<image>"):
        assert read().encode(text) == tokenizer.encode(text)
    with pytest.raises(FormatError, match="belong to different models"):
        read(special=False)  # which would be found in a text
    with pytest.raises(FormatError, match="belong to different models"):
        read(eos="<image>")


LIBRARY_TEXTS = st.text(max_size=40) | texts


def _plain_document(**changes: Any) -> dict[str, Any]:
    metadata = make_metadata()
    document = json.loads(dump_tokenizer(metadata, build_tokenizer(metadata), {})["tokenizer.json"])
    return {**document, **changes}


def _read(document: dict[str, Any]) -> JsonTokenizer:
    highest = max(
        [*document["model"]["vocab"].values(), *(t["id"] for t in document["added_tokens"])]
    )
    return JsonTokenizer(json.dumps(document), TokenizerSettings(vocab_size=highest + 1))


def _without_bytes(document: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary that lacks tokens for some bytes, as SmolLM2's."""
    gone = set(to_byte_characters("\u00e9\u4e2dw".encode()))
    model = document["model"]
    kept = [text for text in model["vocab"] if not gone & set(text)]
    merges = [pair for pair in model["merges"] if not gone & set("".join(pair))]
    vocab = {text: i for i, text in enumerate(kept)}
    added = [
        {**token, "id": vocab.setdefault(token["content"], len(vocab))}
        for token in document["added_tokens"]
    ]
    return {**document, "model": {**model, "vocab": vocab, "merges": merges}, "added_tokens": added}


PLAIN = {
    "as written": _plain_document(),
    "lacks bytes": _without_bytes(_plain_document()),
}
READ_PLAIN = {name: _read(document) for name, document in PLAIN.items()}


@pytest.mark.parametrize("name", PLAIN)
@given(text=LIBRARY_TEXTS)
def test_plain_bpe_gives_the_ids_of_the_library(name: str, text: str) -> None:
    assert READ_PLAIN[name]._plain is not None
    pipeline = Pipeline.from_str(json.dumps(PLAIN[name]))
    pipeline.encode_special_tokens = True
    expected = pipeline.encode(text, add_special_tokens=False).ids
    assert READ_PLAIN[name].encode(text, add_special=False) == expected


def _change_model(**changes: Any) -> dict[str, Any]:
    document = _plain_document()
    return {**document, "model": {**document["model"], **changes}}


@pytest.mark.parametrize(
    "document",
    [
        _change_model(dropout=0.1),
        _change_model(end_of_word_suffix="</w>"),
        _plain_document(normalizer={"type": "NFC"}),
        _plain_document(decoder={"type": "Fuse"}),
        _plain_document(pre_tokenizer={"type": "Whitespace"}),
    ],
)
def test_what_is_not_plain_is_left_to_the_library(document: dict[str, Any]) -> None:
    assert read_plain_bpe(json.dumps(document)) is None


def test_merges_may_be_strings_or_have_escapes() -> None:
    document = _plain_document()
    joined = [" ".join(pair) for pair in document["model"]["merges"]]
    text = "the world \u4e2d hello"
    for changed, escapes in ((_change_model(merges=joined), False), (document, True)):
        read = JsonTokenizer(
            json.dumps(changed, ensure_ascii=escapes), TokenizerSettings(vocab_size=10**4)
        )
        assert read._plain is not None
        assert read.encode(text) == READ_PLAIN["as written"].encode(text)


@given(
    pairs=st.lists(st.tuples(*2 * [st.text(st.characters(exclude_categories=["Cs"]), max_size=3)]))
)
def test_merges_are_cut_as_json_reads_them(pairs: list[tuple[str, str]]) -> None:
    data = json.dumps(pairs, ensure_ascii=False).encode()
    found = cut_json_merges(data + b", 1")
    if found is None:  # escapes, blanks, or none at all
        assert not pairs or b"\\" in data or any(" " in text for pair in pairs for text in pair)
        return
    stored, n_bytes = found
    texts = [" ".join(pair).encode() for pair in pairs]
    assert stored == b"".join(len(t).to_bytes(8, "little") + t for t in texts)
    assert n_bytes == len(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b'["a b"', b'["a b",', b'["a b"}', b'[["a"]]', b'[["a","b","c"]]',
     b'[["a","b"],"c d"]',
     b'[["a b","c"]]', b'[1]', b'["a\n"]', b'["a b]', b'["\\u0061 b"]', b'["a\\'],
)  # fmt: skip
def test_other_merges_are_not_cut(data: bytes) -> None:
    assert cut_json_merges(data) is None


FALCON_STEPS = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Digits", "individual_digits": False},
    {
        "type": "Split",
        "pattern": {"Regex": "[0-9][0-9][0-9]"},
        "behavior": "Isolated",
        "invert": False,
    },
]


def test_falcon_cuts_at_digits_where_nothing_is_merged_anyway() -> None:
    metadata = make_metadata(pre="falcon")
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    joining = [merge for merge in merges if merge.endswith(" 12")]
    assert len(joining) == 1
    for kept, is_refused in ((merges, True), ([m for m in merges if m not in joining], False)):
        metadata["tokenizer.ggml.merges"] = kept
        tokenizer = build_tokenizer(metadata)
        document = json.loads(dump_tokenizer(metadata, tokenizer, {})["tokenizer.json"])
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": FALCON_STEPS}
        settings = TokenizerSettings(vocab_size=len(tokenizer.vocabulary.tokens))
        if is_refused:
            with pytest.raises(FormatError, match="a rule that GGUF has no name for"):
                vocabulary_metadata(json.dumps(document), settings)
            continue
        written = vocabulary_metadata(json.dumps(document), settings)
        assert written["tokenizer.ggml.pre"] == "falcon"
        read = JsonTokenizer(json.dumps(document), settings)
        for text in ("the 12 then12hello 1212 `12` \u00bd", "\u4e2d\u658712 121 2"):
            assert read.encode(text) == build_tokenizer(written).encode(text)
