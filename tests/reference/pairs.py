"""How many (query, key) pairs one head computes, as exact integers."""

from __future__ import annotations


def chunk_bounds(
    n_tokens: int, *, chunk_size: int, batch_size: int | None = None
) -> list[tuple[int, int]]:
    """(first, past the last) position of every chunk; each logical batch opens a new chunk."""
    batch_size = n_tokens if batch_size is None else batch_size
    return [
        (start, min(start + chunk_size, batch + batch_size, n_tokens))
        for batch in range(0, n_tokens, max(batch_size, 1))
        for start in range(batch, min(batch + batch_size, n_tokens), chunk_size)
    ]


def pairs_dense(n_tokens: int) -> int:
    """Pairs of full causal attention: N (N + 1) / 2."""
    return n_tokens * (n_tokens + 1) // 2


def pairs_chunked(
    n_tokens: int, *, chunk_size: int, memory_size: int, batch_size: int | None = None
) -> int:
    """Pairs of chunked sparse prefill: sum n_c (n_c + 1) / 2 + n_c min(M, first position)."""
    return sum(
        pairs_dense(stop - start) + (stop - start) * min(memory_size, start)
        for start, stop in chunk_bounds(n_tokens, chunk_size=chunk_size, batch_size=batch_size)
    )
