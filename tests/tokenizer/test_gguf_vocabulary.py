"""The name that GGUF has for the rule of a tokenizer.json, and what the name must encode alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeh2o.errors import FormatError
from edgeh2o.tokenizer import build_tokenizer
from edgeh2o.tokenizer.gguf_vocabulary import PROBE, vocabulary_metadata
from edgeh2o.tokenizer.tokenizer_json import JsonTokenizer, TokenizerSettings

N_TOKENS = 400
TEXTS = [PROBE, "of 12 and 345 and 6789, the \u00fcber-long \u00bd of it!!", "it is, it was: 2024"]


def falcon_document() -> dict[str, Any]:
    """A vocabulary that is made with the rule of the published Falcon 7B."""
    steps = [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(TEXTS * 4, trainer)
    document: dict[str, Any] = json.loads(pipeline.to_str())
    return document


def test_the_rule_of_falcon_is_found_by_its_steps() -> None:
    text = json.dumps(falcon_document())
    settings = TokenizerSettings(vocab_size=N_TOKENS, eos="<|endoftext|>")
    metadata = vocabulary_metadata(text, settings)
    assert metadata["tokenizer.ggml.pre"] == "falcon"
    ours, theirs = build_tokenizer(metadata), JsonTokenizer(text, settings)
    for each in TEXTS:
        assert ours.encode(each) == theirs.encode(each)


@pytest.mark.parametrize("step", [{"behavior": "Isolated"}, {"type": "Whitespace"}])
def test_other_steps_are_not_falcons(step: dict[str, str]) -> None:
    document = falcon_document()
    document["pre_tokenizer"]["pretokenizers"][0] |= step
    with pytest.raises(FormatError, match="by a rule that GGUF has no name for"):
        vocabulary_metadata(json.dumps(document), TokenizerSettings(vocab_size=N_TOKENS))
