"""Measures what a model loses whose attention multiplies in 8 bits: its ``RoundingQuality``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..attention.rounding_quality import RoundingQuality
from .comparison import TokenScores, WindowComparer, join_scores

if TYPE_CHECKING:
    from ..llm import LLM
    from .long_texts import Window


def count_rounding_steps(llm: LLM, n_windows: int) -> int:
    """Calls of ``on_step`` that ``measure_rounding`` makes; none where nothing is rounded."""
    return 2 * n_windows if llm.may_round_attention else 0


def measure_rounding(
    llm: LLM,
    windows: Mapping[str, Sequence[Window]],
    first: int,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> RoundingQuality | None:
    """Reads windows densely with exact and with rounded products; None where there are none.

    Predictions count after the first ``first`` tokens. Where weights are quantised, activations
    are rounded to 8 bits before every product, and a difference in a last bit sends what follows
    another way: what two reads in chunks of different sizes differ by is taken off. Raises
    ResourceError when two sessions do not fit in memory.
    """
    if not llm.may_round_attention:
        return None
    length = max(len(window) for texts in windows.values() for window in texts)
    chunks = replace(llm.prefill, chunk_size=HeadwiseConfig.preferred_chunk_size)
    exact = llm.start_runner(length, attention=DenseConfig(), all_rows=True)
    comparer = WindowComparer(exact)
    kl, scores = {}, []
    for name, texts in windows.items():
        parts: dict[bool, list[TokenScores]] = {True: [], False: []}
        for window in texts:
            for is_rounded, kept in parts.items():
                other = llm.start_runner(
                    length,
                    attention=DenseConfig(),
                    prefill=llm.prefill if is_rounded else chunks,
                    all_rows=True,
                    is_rounded=is_rounded,
                )
                kept.append(comparer.compare(other, window, first=first))
                on_step()
        rounded, floor = (_mean_kl(parts[is_rounded]) for is_rounded in (True, False))
        kl[name] = round(max(0.0, rounded - floor), 6)
        scores += parts[True]
    joined = join_scores(scores)
    loss = 100 * float(np.expm1((joined.sparse_nll - joined.dense_nll).mean()))
    return RoundingQuality(length=length, kl=kl, loss=round(loss, 4))


def _mean_kl(parts: Sequence[TokenScores]) -> float:
    return float(join_scores(parts).kl.mean())
