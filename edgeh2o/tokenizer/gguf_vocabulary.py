"""A tokenizer.json as the metadata of a GGUF file.

GGUF names the rule by which text is cut into words, where tokenizer.json spells it out: the rule
is found by trial, and what was found must encode a text of many scripts to the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from ..errors import FormatError
from . import build_tokenizer
from .pre_tokenizers import PreTokenizer, all_pre_tokenizers
from .tokenizer_json import JsonTokenizer, TokenizerSettings, parse_document
from .vocabulary import EOG_IDS_KEY, TokenType

# Words that rules tell apart: contractions, digits, blanks, line ends, punctuation, many scripts.
PROBE = (
    "Hello, world! It's we'LL  they'd 3 33 333 3333 1234567.89 \n\n \n\t  x\u00e9 \u00dcber "
    "CamelCase snake_case a+b==c; (foo) [bar] {baz} 'quoted' \"double\" http://a.b/c?d=e#f\r\n"
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u4f60\u597d\u4e16\u754c\u3002 "
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\U0001f600\U0001f680 \u2026 \u2014 --- ... ??? !!! `code`   end\n   \tdone   "
)
# The names that are written for rules which several names share.
_PREFERRED = ("qwen2", "llama-bpe", "smollm", "gpt-2", "tekken", "deepseek-v3", "gpt-4o")


def vocabulary_metadata(text: str, settings: TokenizerSettings) -> dict[str, Any]:
    """The ``tokenizer.ggml.*`` keys for the text of a tokenizer.json.

    Raises FormatError for one that is malformed, or that GGUF files cannot express.
    """
    document = parse_document(text)
    tokenizer = JsonTokenizer(text, settings)
    metadata: dict[str, Any] = dict(tokenizer.metadata)
    if tokenizer.is_byte_level:
        rule = _find_rule(document, tokenizer)
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule.name,
            "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in _merges(document)),
        }
    else:
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(document, metadata),
            "tokenizer.ggml.add_space_prefix": tokenizer.space_prefix,
        }
    metadata["tokenizer.ggml.tokens"] = tuple(metadata["tokenizer.ggml.tokens"])
    ours = build_tokenizer(metadata)
    # What ends a generation by its id alone; other ends are known by their texts.
    unnamed = sorted(tokenizer.eog_ids - ours.eog_ids)
    for name, token_id in zip(("eot", "eom"), unnamed, strict=False):
        metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    if len(unnamed) > 2:
        metadata[EOG_IDS_KEY] = np.array(sorted(tokenizer.eog_ids), np.uint32)
    probes = (PROBE, " " + PROBE, "a", "")
    if any(ours.encode(each) != tokenizer.encode(each) for each in probes):
        raise FormatError(
            "tokenizer.json encodes text in a way that GGUF files cannot express; use a GGUF file "
            "of the model, or run the folder as it is"
        )
    return metadata


def _find_rule(document: Mapping[str, Any], tokenizer: JsonTokenizer) -> PreTokenizer:
    ignores_merges = bool(document["model"].get("ignore_merges", False))
    words = tokenizer.split_words(PROBE)
    rules = [rule for rule in all_pre_tokenizers() if rule.ignore_merges == ignores_merges]
    rules.sort(key=lambda rule: rule.name not in _PREFERRED)
    for rule in rules:
        if _split(rule) == words:
            return rule
    if not ignores_merges and not any(map(_joins_digits, _merges(document))):
        # Falcon's words end where digits begin or end, where nothing would be merged anyway.
        for rule in rules:
            if _split(rule, cuts_digits=True) == words:
                return rule
    raise FormatError(
        "tokenizer.json cuts text into words by a rule that GGUF has no name for; use a GGUF file "
        "of the model, or run the folder as it is"
    )


def _split(rule: PreTokenizer, *, cuts_digits: bool = False) -> list[str]:
    """The words of the probe, which may end where digits begin or end, too."""
    steps: list[Any] = [rule.build()]
    if cuts_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=False))
    words = pre_tokenizers.Sequence(steps).pre_tokenize_str(PROBE)
    return [word for word, _ in words]


def _joins_digits(merge: tuple[str, str]) -> bool:
    """Whether one part ends in a digit and the other begins with none, or the other way round."""
    left, right = merge
    return left[-1:].isnumeric() != right[:1].isnumeric()


def _merges(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs, which older files write with a blank between."""
    pairs = []
    for merge in document["model"].get("merges") or []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(map(_is_text, parts)):
            raise FormatError("tokenizer.json has a merge that is no pair; fetch it again")
        pairs.append((parts[0], parts[1]))
    return pairs


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _scores(document: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    """A piece merges as early as the first merge that makes it."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(document)):
        ranks.setdefault(left + right, rank)
    never = len(ranks) + 1
    types = metadata["tokenizer.ggml.token_type"]
    return np.array(
        [
            -float(ranks.get(token, never)) if kind == TokenType.NORMAL else 0.0
            for token, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
        ],
        np.float32,
    )
