"""What the sparse prefill costs on every kind of ``long_texts``, against a dense one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from ..attention.dense import DenseConfig
from ..errors import UsageError
from .comparison import TokenScores, WindowComparer, estimate_loss
from .decoding import check_decoded, compare_decodes, require_decode_rule, start_decoders
from .long_texts import KINDS, Window, make_window
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
    """``kinds`` in the order they were asked for; ``keys_per_query`` over all their windows.

    ``n_decoded`` tokens of each were decoded, by the rule and densely; 0: prefills are compared.
    """

    text_name: ClassVar[str] = "window"

    kinds: tuple[KindQuality, ...]
    n_decoded: int = 0

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per kind, fit for CSV."""
        return self._records_of(self.kinds)

    def format_text(self) -> str:
        """A heading and a table for a terminal, without a final newline."""
        scored = f"{self.n_decoded:,} tokens decoded" if self.n_decoded else "quarter scored"
        heading = self._heading(f"of each kind, the last {scored}")
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
    n_decoded: int | None = None,
    on_progress: OnProgress | None = None,
) -> SuiteReport:
    """Compares the attention of ``llm`` with full attention on windows made by ``make_window``.

    Every kind (all of ``KINDS`` if none is given) has a window of ``context_size`` tokens per seed;
    its last quarter is scored. With ``n_decoded`` the rest is the prompt of both sides, read by
    ``llm``, and so many tokens are decoded as they stand, by its rule and densely. A model of which
    nothing is known is profiled on the first window. ``on_progress("evaluate", done, total)``
    counts windows. Raises UsageError for an unknown kind, for windows that are too short or longer
    than a text, and for an attention that decodes densely where tokens are decoded, ResourceError
    when two sessions do not fit in memory.
    """
    if context_size < MIN_LENGTH:
        raise UsageError(f"a window needs at least {MIN_LENGTH} tokens, got {context_size}")
    if not seeds:
        raise UsageError("there must be at least one seed")
    n_prompt = context_size - (n_decoded or 0)
    if n_decoded is not None:
        check_decoded(n_decoded, context_size)
        require_decode_rule(llm, n_prompt)
    chosen = tuple(kinds) or tuple(KINDS)
    windows = {
        kind: [make_window(llm, kind, context_size, seed=seed) for seed in seeds] for kind in chosen
    }
    llm.profile_budgets(windows[chosen[0]][0])
    compare = _decodes(llm, context_size, n_decoded) if n_decoded else _prefills(llm, context_size)
    progress = Progress(on_progress, len(chosen) * len(seeds))
    n_pairs, results = 0, []
    for kind in chosen:
        scores = []
        for window in windows[kind]:
            window_scores, pairs_computed = compare(window)
            scores.append(window_scores)
            n_pairs += pairs_computed
            progress.advance()
        results.append(_summarise(kind, scores))
    return SuiteReport(
        model=llm.model_path.name,
        attention=llm.report_attention(n_prompt),
        context=context_size,
        seeds=tuple(seeds),
        keys_per_query=n_pairs / (len(chosen) * len(seeds) * context_size),
        kinds=tuple(results),
        n_decoded=n_decoded or 0,
    )


# Scores of a window, and the pairs that reading it sparsely computed.
_Compare: TypeAlias = Callable[[Window], tuple[TokenScores, int]]


def _prefills(llm: LLM, context_size: int) -> _Compare:
    sparse = llm.start_runner(context_size, all_rows=True)
    dense = llm.start_runner(
        context_size,
        attention=DenseConfig(),
        # Its own chunks, so that rounding is that of a dense run.
        prefill=replace(llm.prefill, chunk_size=None),
        all_rows=True,
    )
    comparer = WindowComparer(dense)
    first = context_size - 1 - context_size // 4

    def compare(window: Window) -> tuple[TokenScores, int]:
        return comparer.compare(sparse, window, first=first), sparse.pairs_computed

    return compare


def _decodes(llm: LLM, context_size: int, n_decoded: int) -> _Compare:
    runners = start_decoders(llm, context_size, context_size - n_decoded)

    def compare(window: Window) -> tuple[TokenScores, int]:
        (scores,) = compare_decodes(runners, window, n_decoded, on_tokens=lambda _: None)
        return scores, runners[1].pairs_computed

    return compare


def _summarise(kind: str, windows: Sequence[TokenScores]) -> KindQuality:
    dense, sparse, kl, agrees = (
        np.concatenate([getattr(scores, name) for scores in windows])
        for name in ("dense_nll", "sparse_nll", "kl", "agrees")
    )
    loss, error = estimate_loss(sparse - dense)
    return KindQuality(
        kind=kind,
        tokens=len(dense),
        dense_perplexity=float(np.exp(dense.mean())),
        loss_percent=loss,
        loss_percent_error=error,
        kl=float(kl.mean()),
        top1_percent=100 * float(agrees.mean()),
    )
