"""Which rows of a table the last tokens of a text name (per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Which rows of a table the last tokens name: see ``ngram_rows``."""

    layer: int
    n_tokens: int
    n_heads_per_size: int
    end_token: int
    factors: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def ngram_rows(ngrams: Ngrams, tokens: Sequence[int]) -> list[int]:
    """Rows that the last of the tokens looks up, of every length of n-grams from 2 on.

    A hash is the exclusive or of the tokens times a factor each, the last first, modulo 2**64. A
    token that ends a text, but for the last one, hides those before it: they count as that token,
    and so do those before the first.
    """
    seen = [int(token) for token in reversed(tokens[-ngrams.n_tokens :])]
    seen += [ngrams.end_token] * (ngrams.n_tokens - len(seen))
    if ngrams.end_token in seen[1:]:
        cut = seen.index(ngrams.end_token, 1)
        seen[cut:] = [ngrams.end_token] * (ngrams.n_tokens - cut)
    rows, mixed = [], seen[0] * ngrams.factors[0] % 2**64
    for length in range(2, ngrams.n_tokens + 1):
        mixed ^= seen[length - 1] * ngrams.factors[length - 1] % 2**64
        for head in range(ngrams.n_heads_per_size):
            number = (length - 2) * ngrams.n_heads_per_size + head
            rows.append(mixed % ngrams.sizes[number] + ngrams.offsets[number])
    return rows
