"""BPE on raw UTF-8: the merges of byte-level BPE with the characters of SentencePiece.

The text is cut at line ends only, blanks are written as U+2581, and a character that is no token
becomes the tokens ``<0x00>`` to ``<0xFF>`` of its bytes, as far as the vocabulary has them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .base import After, Tokenizer
from .bpe import build_pair_merger, read_merges
from .vocabulary import BLANK, read_vocabulary, spell_piece

_LINES = re.compile(r"[^\n]+|\n+")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RawRule:
    """What a family of models wants.

    ``takes_line_ends_whole``: a run of line ends that is a token stays one, whatever the merges
    say. ``always_adds_bos``: even where the file says no, as published files of the family do.
    """

    name: str
    takes_line_ends_whole: bool = False
    always_adds_bos: bool = False


RAW_RULES = {
    rule.name: rule
    for rule in (
        RawRule("gemma4", takes_line_ends_whole=True, always_adds_bos=True),
        RawRule("granite-embed-multi-311m", takes_line_ends_whole=True, always_adds_bos=True),
        RawRule("sarvam-moe"),
    )
}


class RawBpeTokenizer(Tokenizer):
    """BPE on raw UTF-8 (``tokenizer.ggml.pre`` of ``RAW_RULES``)."""

    def __init__(self, metadata: Mapping[str, object], *, model_name: str, pre_name: str) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        self._rule = rule = RAW_RULES[pre_name]
        super().__init__(
            read_vocabulary(metadata),
            metadata,
            model_name=model_name,
            pre_name=pre_name,
            default_add_bos=rule.always_adds_bos,
        )
        if rule.always_adds_bos and not self.add_bos and self.bos_id is not None:
            _logger.warning("the file asks for no BOS token, but '%s' needs one", rule.name)
            self.add_bos = True
        vocabulary = self.vocabulary
        self._merger = build_pair_merger(vocabulary, read_merges(metadata))
        self._characters = frozenset(text for text in vocabulary.tokens if len(text) == 1)
        self._byte_ids = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in range(256)]

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        words = _LINES.findall(text.replace(" ", BLANK))
        return [token_id for word in words for token_id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        if self._rule.takes_line_ends_whole and word[0] == "\n":
            whole = self._vocabulary.ids.get(word)
            if whole is not None:
                return [whole]
        if self._characters.issuperset(word):
            return self._merger.encode([word])
        ids: list[int] = []
        # What is no token is part of no merge: the runs between merge as if they were alone.
        for is_known, run in groupby(word, self._characters.__contains__):
            characters = "".join(run)
            ids += self._merger.encode([characters]) if is_known else self._spell_out(characters)
        return ids

    def _spell_out(self, characters: str) -> Iterator[int]:
        """The byte tokens of what is unknown; bytes without a token vanish."""
        for byte in characters.encode("utf-8"):
            byte_id = self._byte_ids[byte]
            if byte_id is not None:
                yield byte_id

    def _spell(self, text: str) -> bytes:
        return spell_piece(text)
