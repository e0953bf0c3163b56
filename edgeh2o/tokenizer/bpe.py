"""Byte-pair merging: what every vocabulary with merges shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import FormatError
from ..formats.metadata import Metadata, StoredStrings
from .vocabulary import Vocabulary, read_string_list

if TYPE_CHECKING:
    from ._bpe import PairMerger

MERGES_KEY = "tokenizer.ggml.merges"


def read_merges(metadata: Mapping[str, object]) -> Sequence[str] | StoredStrings:
    """``tokenizer.ggml.merges``, as the file holds them where nobody made texts of them yet."""
    if isinstance(metadata, Metadata):
        stored = metadata.stored(MERGES_KEY)
        if isinstance(stored, StoredStrings):
            return stored
    return read_string_list(metadata, MERGES_KEY)


def build_pair_merger(
    vocabulary: Vocabulary, merges: Sequence[str] | StoredStrings, *, ignore_merges: bool = False
) -> PairMerger:
    """What merges the characters of words, the pair that stands first in ``merges`` first.

    ``ignore_merges`` takes words of the vocabulary as they are. Raises ``FormatError`` for merges
    that are no pairs of known texts.
    """
    from ._bpe import PairMerger

    pairs = merges.items if isinstance(merges, StoredStrings) else merges
    try:
        return PairMerger(vocabulary.tokens, pairs, ignore_merges=ignore_merges)
    except ValueError as error:
        texts = merges.texts() if isinstance(merges, StoredStrings) else merges
        _check_merges(vocabulary.ids, texts)
        raise FormatError(f"the vocabulary cannot be used: {error}") from None


def _check_merges(ids: Mapping[str, int], merges: Sequence[str]) -> None:
    """Raises ``FormatError`` that names the first malformed merge, if there is one."""
    key = MERGES_KEY
    first: dict[str, int] = {}
    for i, merge in enumerate(merges):
        shown = repr(merge[:80])
        parts = merge.split(" ")
        if len(parts) != 2 or not all(parts):
            raise FormatError(f"{key}[{i}] is {shown}; a merge is two token texts and one space")
        for text in (*parts, "".join(parts)):
            if text not in ids:
                raise FormatError(f"{key}[{i}] is {shown}, but the vocabulary has no {text[:40]!r}")
        if first.setdefault(merge, i) != i:
            raise FormatError(f"{key}[{i}] repeats entry {first[merge]}: {shown}")
