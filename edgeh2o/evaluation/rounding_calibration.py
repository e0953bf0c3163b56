"""Measures what a model loses whose attention multiplies in 8 bits, for its ``RoundingQuality``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..attention.rounding_quality import KL_LIMIT

if TYPE_CHECKING:
    from ..config import PrefillConfig
    from ..llm import LLM
    from .comparison import TokenScores, WindowComparer
    from .long_texts import Window


class RoundingMeter:
    """Compares dense reads of rounded products with those of exact ones.

    The latter are those of ``comparer``, whose runner has the batches of ``prefill``. Where weights
    are quantised, activations are rounded to 8 bits before every product, and a difference in
    a last bit sends what follows another way: of a divergence above the limit is taken off what two
    exact reads in chunks of different sizes differ by.
    """

    def __init__(self, llm: LLM, comparer: WindowComparer, prefill: PrefillConfig) -> None:
        self._llm = llm
        self._comparer = comparer
        self._prefill = prefill

    def measure(self, window: Window, *, first: int) -> tuple[float, float]:
        """Mean KL, and the mean of what is added to negative log-probabilities, in nats.

        Of the predictions after the first ``first`` tokens. Raises ResourceError when a session
        does not fit in memory besides the comparer's.
        """
        scores = self._compare(window, first, self._prefill, is_rounded=True)
        kl = float(scores.kl.mean())
        if kl > KL_LIMIT:
            chunks = replace(self._prefill, chunk_size=HeadwiseConfig.preferred_chunk_size)
            exact = self._compare(window, first, chunks, is_rounded=False)
            kl = max(0.0, kl - float(exact.kl.mean()))
        return kl, float((scores.sparse_nll - scores.dense_nll).mean())

    def _compare(
        self, window: Window, first: int, prefill: PrefillConfig, *, is_rounded: bool
    ) -> TokenScores:
        other = self._llm.start_runner(
            len(window),
            attention=DenseConfig(),
            prefill=prefill,
            all_rows=True,
            is_rounded=is_rounded,
        )
        return self._comparer.compare(other, window, first=first)
