"""What the sparse prefill costs on every kind of ``long_texts``, against a dense one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..attention.dense import DenseConfig
from ..config import PrefillConfig
from ..errors import UsageError
from .comparison import TokenScores, WindowComparer
from .long_texts import KINDS, make_window
from .progress import Progress
from .reporting import format_estimate, markdown_table
from .seeded_report import SeededReport
from .windows import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM

DEFAULT_SEEDS = 2
MIN_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KindQuality:
    """Means over the scored predictions of all windows of one kind of text.

    ``loss_percent`` is how much larger the sparse perplexity is, with the standard error of the
    paired differences over tokens; KL(dense || sparse) is in nats.
    """

    kind: str
    tokens: int
    dense_perplexity: float
    loss_percent: float
    loss_percent_error: float
    kl: float
    top1_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport(SeededReport):
    """``kinds`` in the order they were asked for; ``keys_per_query`` over all their windows."""

    text_name: ClassVar[str] = "window"

    kinds: tuple[KindQuality, ...]

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per kind, fit for CSV."""
        return self._records_of(self.kinds)

    def format_text(self) -> str:
        """A heading and a table for a terminal, without a final newline."""
        heading = self._heading("of each kind, the last quarter scored")
        header = ["text", "count", "dense perplexity", "loss %", "KL(dense, sparse)"]
        rows = [
            [
                kind.kind,
                f"{kind.tokens:,}",
                f"{kind.dense_perplexity:.2f}",
                format_estimate(kind.loss_percent, kind.loss_percent_error, sign="+"),
                f"{kind.kl:.4f}",
                f"{kind.top1_percent:.1f}",
            ]
            for kind in self.kinds
        ]
        return f"{heading}\n\n{markdown_table([*header, 'same top-1 %'], rows)}"


def evaluate_suite(
    llm: LLM,
    *,
    context_size: int = DEFAULT_CONTEXT,
    kinds: Sequence[str] = (),
    seeds: Sequence[int] = tuple(range(DEFAULT_SEEDS)),
    on_progress: OnProgress | None = None,
) -> SuiteReport:
    """Compares the attention of ``llm`` with full attention on windows made by ``make_window``.

    Every kind (all of ``KINDS`` if none is given) has a window of ``context_size`` tokens per seed;
    its last quarter is scored. A model of which nothing is known is profiled on the first window.
    ``on_progress("evaluate", done, total)`` counts windows. Raises UsageError for an unknown kind
    and for windows that are too short or longer than a text, ResourceError when two sessions do not
    fit in memory.
    """
    if context_size < MIN_LENGTH:
        raise UsageError(f"a window needs at least {MIN_LENGTH} tokens, got {context_size}")
    if not seeds:
        raise UsageError("there must be at least one seed")
    chosen = tuple(kinds) or tuple(KINDS)
    windows = {
        kind: [make_window(llm, kind, context_size, seed=seed) for seed in seeds] for kind in chosen
    }
    llm.profile_budgets(windows[chosen[0]][0])
    sparse = llm.start_runner(context_size, all_rows=True)
    dense = llm.start_runner(
        context_size,
        attention=DenseConfig(),
        # Its own chunks, so that rounding is that of a dense run, in batches that agree.
        prefill=PrefillConfig(batch_size=sparse.batch_size),
        all_rows=True,
    )
    comparer = WindowComparer(dense)
    progress = Progress(on_progress, len(chosen) * len(seeds))
    first = context_size - 1 - context_size // 4
    n_pairs, results = 0, []
    for kind in chosen:
        scores = []
        for window in windows[kind]:
            scores.append(comparer.compare(sparse, window, first=first))
            n_pairs += sparse.pairs_computed
            progress.advance()
        results.append(_summarise(kind, scores))
    return SuiteReport(
        model=llm.model_path.name,
        attention=llm.attention.report(llm.config),
        context=context_size,
        seeds=tuple(seeds),
        keys_per_query=n_pairs / (len(chosen) * len(seeds) * context_size),
        kinds=tuple(results),
    )


def _summarise(kind: str, windows: Sequence[TokenScores]) -> KindQuality:
    dense, sparse, kl, agrees = (
        np.concatenate([getattr(scores, name) for scores in windows])
        for name in ("dense_nll", "sparse_nll", "kl", "agrees")
    )
    difference = sparse - dense
    ratio = float(np.exp(difference.mean()))
    return KindQuality(
        kind=kind,
        tokens=len(difference),
        dense_perplexity=float(np.exp(dense.mean())),
        loss_percent=100 * (ratio - 1),
        loss_percent_error=100 * ratio * float(difference.std(ddof=1) / np.sqrt(len(difference))),
        kl=float(kl.mean()),
        top1_percent=100 * float(agrees.mean()),
    )
