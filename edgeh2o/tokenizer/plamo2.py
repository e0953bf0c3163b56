"""PLaMo 2 and 3 (``tokenizer.ggml.model`` = "plamo2"): the pieces whose scores add up to the most.

A character that is no piece becomes its UTF-8 bytes, for a score that no piece has. Of equal sums
the one whose first piece is longest counts. Compared with llama.cpp, text can not become a control,
unknown, unused or byte token: only ``parse_special`` makes those from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from .base import After, Tokenizer
from .sentencepiece import find_byte_ids
from .vocabulary import TokenType, read_scores, read_vocabulary

# What files that do not name these tokens mean.
_DEFAULT_IDS = {"bos": 1, "eos": 2}
_PIECES = frozenset((TokenType.NORMAL, TokenType.USER_DEFINED))
# Scores are counted in ten-thousandths: of what is no piece, and of pieces that are never taken.
_SCORE_UNITS = 1e4
_UNKNOWN_COST = 10_000_000
_NEVER = 20_000_000
_BYTE_ORDER_MARK = "\ufeff"


class PlamoTokenizer(Tokenizer):
    """Unigram pieces with byte fallback; blanks are what they are."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises ``FormatError`` for a malformed vocabulary."""
        vocabulary = read_vocabulary(metadata, default_ids=_DEFAULT_IDS)
        super().__init__(
            vocabulary, metadata, model_name="plamo2", pre_name="default", default_add_bos=False
        )
        self._scores = read_scores(metadata, len(vocabulary))
        self._byte_ids = find_byte_ids(vocabulary, None)

    @cached_property
    def _costs(self) -> dict[str, tuple[int, int]]:
        """Of every piece its cost and its id."""
        import numpy as np

        scaled = self._scores.astype(np.float64) * _SCORE_UNITS
        # Halves away from zero.
        costs = -np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
        usable = np.isfinite(costs) & (costs < _NEVER)
        rows = zip(self._vocabulary.tokens, self._vocabulary.types, usable, costs, strict=True)
        return {
            text: (int(cost), token_id)
            for token_id, (text, kind, is_usable, cost) in enumerate(rows)
            if kind in _PIECES and is_usable and text
        }

    @cached_property
    def _lengths(self) -> dict[str, tuple[int, ...]]:
        """How long pieces are that begin with a character, the longest first."""
        found: dict[str, set[int]] = {}
        for text in self._costs:
            found.setdefault(text[0], set()).add(len(text))
        return {first: tuple(sorted(lengths, reverse=True)) for first, lengths in found.items()}

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        text = text.removeprefix(_BYTE_ORDER_MARK)
        costs, lengths, n = self._costs, self._lengths, len(text)
        # Of the rest of the text from each character on; and the piece that it begins with.
        totals, steps = [0] * (n + 1), [(1, -1)] * n
        for start in range(n - 1, -1, -1):
            best, step = None, (1, -1)
            for length in lengths.get(text[start], ()):
                piece = costs.get(text[start : start + length])
                if piece is None or start + length > n:
                    continue
                total = totals[start + length] + piece[0]
                if best is None or total < best:
                    best, step = total, (length, piece[1])
            unknown = totals[start + 1] + _UNKNOWN_COST
            if best is None or unknown < best:
                best, step = unknown, (1, -1)
            totals[start], steps[start] = best, step
        ids: list[int] = []
        at = 0
        while at < n:
            length, token_id = steps[at]
            if token_id >= 0:
                ids.append(token_id)
            else:
                ids += [self._byte_ids[byte] for byte in text[at].encode("utf-8")]
            at += length
        return ids

    def _spell(self, text: str) -> bytes:
        return text.encode("utf-8")
