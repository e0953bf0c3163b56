"""Perplexity of a text, read densely and sparsely in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..attention.base import describe_settings
from ..attention.dense import DenseConfig
from ..config import PrefillConfig
from ..errors import UsageError
from .comparison import TokenScores, WindowComparer, join_scores, standard_error
from .progress import Progress
from .reporting import format_count, format_estimate, markdown_table
from .windows import DEFAULT_CONTEXT, DEFAULT_SKIP, cut_windows, scored_ranges

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeQuality:
    """Means over one range of every window's predicted tokens.

    ``loss_percent`` is how much larger the sparse perplexity is, KL(dense || sparse) is in nats,
    and top-1 agreement in percent. Every ``_error`` is the standard error of a mean over tokens:
    that of the loss comes from the paired differences of the negative log-probabilities. It is NaN
    for a single token.
    """

    range: str
    tokens: int
    dense_perplexity: float
    dense_perplexity_error: float
    sparse_perplexity: float
    sparse_perplexity_error: float
    loss_percent: float
    loss_percent_error: float
    kl: float
    kl_error: float
    top1_percent: float
    top1_percent_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport:
    """``ranges`` over all windows, ``windows`` the same for each window on its own.

    Pairs are sums over the windows, averaged over layers and KV heads.
    """

    model: str
    attention: dict[str, Any]
    chunk_size: int
    context: int
    n_windows: int
    pairs_computed: int
    pairs_dense: int
    ranges: tuple[RangeQuality, ...]
    windows: tuple[tuple[RangeQuality, ...], ...]

    @property
    def keys_per_query(self) -> float:
        """Keys that a query reads on average, itself included."""
        return self.pairs_computed / (self.n_windows * self.context)

    def find(self, range_name: str) -> RangeQuality:
        """The means over the range of this name. Raises KeyError."""
        for quality in self.ranges:
            if quality.range == range_name:
                return quality
        raise KeyError(range_name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, fit for JSON."""
        return {**asdict(self), "keys_per_query": self.keys_per_query}

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per range, fit for CSV."""
        shared = {
            "model": self.model,
            "attention": describe_settings(self.attention),
            "chunk_size": self.chunk_size,
            "context": self.context,
            "windows": self.n_windows,
            "keys_per_query": self.keys_per_query,
        }
        return [shared | asdict(quality) for quality in self.ranges]

    def format_text(self) -> str:
        """A heading and a table for a terminal, without a final newline."""
        n_tokens = self.n_windows * self.context
        heading = (
            f"{self.model}: {format_count(self.n_windows, 'window')} of {self.context:,} tokens\n"
            f"{describe_settings(self.attention)}, chunks of {self.chunk_size:,}: "
            f"{self.keys_per_query:,.0f} keys per query, dense "
            f"{self.pairs_dense / n_tokens:,.0f} "
            f"({100 * self.pairs_computed / max(1, self.pairs_dense):.0f} %)"  # 0: no layer attends
        )
        header = ["tokens", "count", "dense perplexity", "sparse perplexity", "loss %"]
        header += ["KL(dense, sparse)", "same top-1 %"]
        rows = [
            [
                q.range,
                f"{q.tokens:,}",
                format_estimate(q.dense_perplexity, q.dense_perplexity_error, 3),
                format_estimate(q.sparse_perplexity, q.sparse_perplexity_error, 3),
                format_estimate(q.loss_percent, q.loss_percent_error, sign="+"),
                format_estimate(q.kl, q.kl_error, 5),
                format_estimate(q.top1_percent, q.top1_percent_error),
            ]
            for q in self.ranges
        ]
        return f"{heading}\n\n{markdown_table(header, rows)}"


def evaluate_perplexity(
    llm: LLM,
    text: str,
    *,
    context_size: int = DEFAULT_CONTEXT,
    windows: int | None = None,
    skip: int = DEFAULT_SKIP,
    on_progress: OnProgress | None = None,
) -> PerplexityReport:
    """Compares the attention of ``llm`` with full attention on consecutive windows of ``text``.

    Every window of ``context_size`` tokens is a prompt of its own; ``windows=None`` takes all.
    ``skip`` names the range of tokens from which on the loss is reported besides that of all.
    Logits are compared in blocks, so that memory does not grow with the vocabulary times the
    context. ``on_progress("evaluate", done, total)`` counts tokens.

    Raises UsageError for a text that is too short and ResourceError when two sessions do not fit
    in memory.
    """
    if skip < 0:
        raise UsageError(f"the number of tokens to skip must be at least 0, got {skip}")
    tokens = cut_windows(llm, text, context_size, windows)
    llm.profile_budgets(tokens[0])
    sparse = llm.start_runner(context_size, all_rows=True)
    same_batches = PrefillConfig(batch_size=sparse.batch_size, chunk_size=sparse.chunk_size)
    comparer = WindowComparer(
        llm.start_runner(context_size, attention=DenseConfig(), prefill=same_batches, all_rows=True)
    )
    progress = Progress(on_progress, tokens.size)
    pairs_computed, pairs_dense = 0, 0
    scores = []
    for window in tokens:
        scores.append(comparer.compare(sparse, window, on_tokens=progress.advance))
        pairs_computed += sparse.pairs_computed
        pairs_dense += sparse.pairs_dense
    return PerplexityReport(
        model=llm.model_path.name,
        attention=llm.report_attention(context_size),
        chunk_size=sparse.chunk_size,
        context=context_size,
        n_windows=len(tokens),
        pairs_computed=pairs_computed,
        pairs_dense=pairs_dense,
        ranges=summarise_ranges(scores, context_size, skip),
        windows=tuple(summarise_ranges([window], context_size, skip) for window in scores),
    )


def summarise_ranges(
    scores: Sequence[TokenScores], context_size: int, skip: int
) -> tuple[RangeQuality, ...]:
    """The means of every scored range over windows of ``context_size`` tokens."""
    return summarise_parts(scores, scored_ranges(context_size, skip))


def summarise_parts(
    scores: Sequence[TokenScores], ranges: Mapping[str, tuple[int, int]]
) -> tuple[RangeQuality, ...]:
    """The means of ranges [first, last) of every window, by name."""
    return tuple(
        _summarise(name, join_scores([window.part(first, last) for window in scores]))
        for name, (first, last) in ranges.items()
    )


def _summarise(name: str, scores: TokenScores) -> RangeQuality:
    dense, dense_error = _mean(scores.dense_nll)
    sparse, sparse_error = _mean(scores.sparse_nll)
    difference, difference_error = _mean(scores.sparse_nll - scores.dense_nll)
    kl, kl_error = _mean(scores.kl)
    top1, top1_error = _mean(100 * scores.agrees)
    ratio = float(np.exp(difference))
    return RangeQuality(
        range=name,
        tokens=len(scores),
        dense_perplexity=float(np.exp(dense)),
        dense_perplexity_error=float(np.exp(dense)) * dense_error,
        sparse_perplexity=float(np.exp(sparse)),
        sparse_perplexity_error=float(np.exp(sparse)) * sparse_error,
        loss_percent=100 * (ratio - 1),
        loss_percent_error=100 * ratio * difference_error,
        kl=kl,
        kl_error=kl_error,
        top1_percent=top1,
        top1_percent_error=top1_error,
    )


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), standard_error(values)
