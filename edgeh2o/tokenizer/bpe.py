"""Byte-pair merging: what every vocabulary with merges shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ..errors import FormatError

if TYPE_CHECKING:
    import tokenizers

    from ._bpe import PairMerger
    from .vocabulary import Vocabulary


def build_pair_merger(
    vocabulary: Vocabulary, merges: Sequence[str], *, ignore_merges: bool = False
) -> PairMerger:
    """What merges the characters of words, the pair that stands first in ``merges`` first.

    ``ignore_merges`` takes words of the vocabulary as they are. Raises ``FormatError`` for merges
    that are no pairs of known texts.
    """
    from ._bpe import PairMerger

    try:
        return PairMerger(vocabulary.tokens, merges, ignore_merges=ignore_merges)
    except ValueError as error:
        _check_merges(vocabulary.ids, merges)
        raise FormatError(f"the vocabulary cannot be used: {error}") from None


def build_merger(
    ids: Mapping[str, int],
    merges: Sequence[str],
    *,
    unknown_id: int | None,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """As ``build_pair_merger``, an object of the library ``tokenizers``.

    ``unknown_id``, an id beyond the vocabulary, stands for characters without a token; None if
    there are none such. ``ignore_merges`` takes words of the vocabulary as they are. Raises
    ``FormatError`` for merges that are no pairs of known texts.
    """
    from tokenizers import Tokenizer, models

    # The library panics over a merge that makes a text longer than any of the vocabulary.
    longest = max(len(text.encode("utf-8")) for text in ids)
    if len(set(merges)) != len(merges) or any(
        len(merge.encode("utf-8", "surrogatepass")) - 1 > longest for merge in merges
    ):
        _check_merges(ids, merges)
    vocab = dict(ids)
    unknown = None
    if unknown_id is not None:
        unknown = "\0"
        while unknown in vocab:
            unknown += "\0"
        vocab[unknown] = unknown_id
    # BPE refuses what is not a pair of known texts; the checks then say which entry it is.
    pairs = cast("list[tuple[str, str]]", [tuple(merge.split(" ")) for merge in merges])
    try:
        bpe = models.BPE(vocab, pairs, unk_token=unknown, ignore_merges=ignore_merges)
    except Exception as error:
        _check_merges(ids, merges)
        raise FormatError(f"the vocabulary cannot be used: {error}") from error
    return Tokenizer(bpe)


def _check_merges(ids: Mapping[str, int], merges: Sequence[str]) -> None:
    """Raises ``FormatError`` that names the first malformed merge, if there is one."""
    key = "tokenizer.ggml.merges"
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
