"""Plain byte-level BPE of a tokenizer.json, taken over by the project's own merging.

The library ``tokenizers`` takes twice as long to get a vocabulary ready. Here it is given the file
without vocabulary and merges, and finds the words; what is not plain is left to it whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .byte_bpe import byte_characters

if TYPE_CHECKING:
    from ._bpe import PairMerger

_MERGES = re.compile(r'"merges"\s*:\s*(?=\[)')
# In the library's place: its only token, for which no file has the same id.
_PROBE_VOCABULARY = {"a": 2**31 - 1}
# Settings of the model that change its ids, and what leaves them alone.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "dropout": (None,),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (None, False),
    "byte_fallback": (None, False),
}
_KNOWN = {*_NEUTRAL, "type", "ignore_merges", "vocab", "merges"}


@dataclass(frozen=True, slots=True)
class PlainBpe:
    """``steps`` is the file with a vocabulary of its own; ``ids`` are those of all texts;
    ``added`` are the texts of added tokens and whether they are special; ``unknown`` are the
    characters of bytes that have no token."""

    steps: str
    ids: Mapping[str, int]
    added: Sequence[tuple[str, bool]]
    unknown: frozenset[str]
    merger: PairMerger

    def encode(self, words: Sequence[str]) -> list[int]:
        """The ids of words. As in the library, what is unknown vanishes before the rest merges."""
        if self.unknown and not self.unknown.isdisjoint("".join(words)):
            table = dict.fromkeys(map(ord, self.unknown))
            words = [word.translate(table) for word in words]
        ids: list[int] = self.merger.encode(words)
        return ids


def read_plain_bpe(text: str) -> PlainBpe | None:
    """The vocabulary and the merges of a tokenizer.json; None for one that is not plain.

    Those of which the library makes ids by other rules are not, nor is what it would refuse.
    """
    if "ByteLevel" not in text:  # saves the parsing of those that cannot be plain
        return None
    try:
        text, stored = _cut_merges(text)
        document = json.loads(text)
        model = document["model"]
        if not _is_plain(document, model) or (stored is not None and model["merges"]):
            return None
        tokens = _list_tokens(model["vocab"])
        merges = _list_merges(model["merges"]) if stored is None else stored
        ids = dict(model["vocab"])
        added = _add_tokens(document.get("added_tokens") or [], ids)
        if tokens is None or merges is None or added is None:
            return None
        unknown = frozenset(byte_characters()).difference(tokens)
        takes_whole_words = model.get("ignore_merges") is True
        if unknown and takes_whole_words:
            return None
        from ._bpe import PairMerger

        merger = PairMerger(tokens, merges, ignore_merges=takes_whole_words)
        steps = {**document, "added_tokens": [], "model": {**model, "ignore_merges": False}}
        steps["model"] |= {"vocab": _PROBE_VOCABULARY, "merges": []}
        return PlainBpe(json.dumps(steps), ids, added, unknown, merger)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # the library says what is wrong with it


def _cut_merges(text: str) -> tuple[str, bytes | None]:
    """The text with an empty array for the merges, and these as PairMerger takes them.

    Half of the time of the parsing is theirs. The text alone where they are not found or unusual.
    """
    from ._bpe import cut_json_merges

    last = text.rfind('"merges"')
    match = _MERGES.match(text, max(0, last))
    at = text.find('"merges"')
    while at < last and _MERGES.match(text, at) is None:  # a token of the vocabulary
        at = text.find('"merges"', at + 1)
    if match is None or at < last or text[last - 1 : last] == "\\":
        return text, None
    start = match.end()
    rest = text[start:].encode()
    found = cut_json_merges(rest)
    if found is None:
        return text, None
    merges, n_bytes = found
    return f"{text[:start]}[]{rest[n_bytes:].decode()}", merges


def _is_plain(document: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    last = document["pre_tokenizer"]
    if last["type"] == "Sequence":
        last = last["pretokenizers"][-1]
    return (
        model["type"] == "BPE"
        and model.keys() <= _KNOWN
        and all(model.get(name) in values for name, values in _NEUTRAL.items())
        and model.get("ignore_merges") in (None, False, True)
        and document.get("normalizer") is None
        and document["decoder"]["type"] == "ByteLevel"
        and last["type"] == "ByteLevel"  # all that is merged are characters of bytes
    )


def _list_tokens(vocab: Mapping[str, int]) -> list[str] | None:
    """The texts in the order of their ids; None unless these go from 0 up."""
    texts: list[str | None] = [None] * len(vocab)
    if set(map(type, vocab.values())) != {int} or min(vocab.values()) < 0:
        return None
    for text, token_id in vocab.items():
        if token_id >= len(texts):
            return None
        texts[token_id] = text
    tokens = [text for text in texts if text]
    # A blank would make merges ambiguous.
    return tokens if len(tokens) == len(texts) and " " not in "\n".join(tokens) else None


def _list_merges(merges: Sequence[Any]) -> list[str] | None:
    """Pairs with a blank between, as older files have them; the texts are not looked at."""
    kinds = set(map(type, merges))
    if kinds <= {str}:
        return list(merges)
    if kinds != {list} or set(map(len, merges)) != {2}:
        return None
    return list(map(" ".join, merges))


def _add_tokens(added: Sequence[Any], ids: dict[str, int]) -> list[tuple[str, bool]] | None:
    """The added tokens, also to ``ids``; None for ids and settings other than most files have."""
    found: dict[str, bool] = {}
    for token in added:
        text, is_special = token["content"], token["special"]
        if not isinstance(text, str) or not text or text in found or type(is_special) is not bool:
            return None
        if ids.setdefault(text, len(ids)) != token["id"]:
            return None
        if not is_special and (token["single_word"] or token["lstrip"] or token["rstrip"]):
            return None
        found[text] = is_special
    return list(found.items())
