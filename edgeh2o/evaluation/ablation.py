"""Loss against cost over a grid of attention settings, all on the same windows of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ..attention.base import SparseAttentionConfig
from ..attention.dense import DenseConfig
from ..config import PrefillConfig
from ..errors import UsageError
from .comparison import TokenScores, WindowComparer
from .perplexity import RangeQuality, summarise_ranges
from .progress import Progress
from .reporting import format_count, format_estimate, markdown_table
from .windows import DEFAULT_CONTEXT, DEFAULT_SKIP, cut_windows

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM

CHUNK_SIZE = "chunk_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of a grid: the values that vary, and the attention and chunk size they make."""

    values: dict[str, Any]
    attention: SparseAttentionConfig
    chunk_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """A setting, its cost in keys per query, and its quality over each range of tokens."""

    setting: Setting
    keys_per_query: float
    ranges: tuple[RangeQuality, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationReport:
    """All settings. ``range_name`` is the range that tables and pictures show."""

    model: str
    context: int
    n_windows: int
    dense_keys_per_query: float
    range_name: str
    results: tuple[AblationResult, ...]

    def quality(self, result: AblationResult) -> RangeQuality:
        """The quality of a result over the range that is shown."""
        return next(q for q in result.ranges if q.range == self.range_name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON, with every range."""
        return {
            "model": self.model,
            "context": self.context,
            "n_windows": self.n_windows,
            "dense_keys_per_query": self.dense_keys_per_query,
            "results": [
                {
                    "values": result.setting.values,
                    "attention": result.setting.attention.to_dict(),
                    "chunk_size": result.setting.chunk_size,
                    "keys_per_query": result.keys_per_query,
                    "ranges": [asdict(quality) for quality in result.ranges],
                }
                for result in self.results
            ],
        }

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per setting over the range that is shown, fit for CSV."""
        return [
            {
                "model": self.model,
                "context": self.context,
                "windows": self.n_windows,
                **result.setting.values,
                "attention": result.setting.attention.describe(),
                "chunk_size": result.setting.chunk_size,
                "keys_per_query": result.keys_per_query,
                **asdict(self.quality(result)),
            }
            for result in self.results
        ]

    def format_text(self) -> str:
        """A heading and a row per setting, without a final newline."""
        heading = (
            f"{self.model}: {format_count(self.n_windows, 'window')} of {self.context:,} tokens, "
            f"range '{self.range_name}', dense {self.dense_keys_per_query:,.0f} keys per query"
        )
        names = list(self.results[0].setting.values)
        header = [*names, "keys/query", "loss %", "KL(dense, sparse)", "same top-1 %"]
        rows = []
        for result in self.results:
            quality = self.quality(result)
            rows.append(
                [
                    *result.setting.values.values(),
                    f"{result.keys_per_query:,.0f}",
                    format_estimate(quality.loss_percent, quality.loss_percent_error, sign="+"),
                    format_estimate(quality.kl, quality.kl_error, 5),
                    format_estimate(quality.top1_percent, quality.top1_percent_error),
                ]
            )
        return f"{heading}\n\n{markdown_table(header, rows)}"


def expand_grid(
    attention: SparseAttentionConfig, chunk_size: int, grid: Mapping[str, Sequence[Any]]
) -> list[Setting]:
    """Every combination of the grid's values, the last field varying fastest.

    Fields are those of ``attention`` that have flags, and ``chunk_size``. Raises UsageError for an
    unknown field, a field without values, or a value that the attention refuses.
    """
    known = [item.name for item in fields(attention) if item.metadata.get("is_option", True)]
    for name, candidates in grid.items():
        if name not in (*known, CHUNK_SIZE):
            raise UsageError(
                f"{attention.algorithm} has no setting {name!r}; it has "
                f"{', '.join((*known, CHUNK_SIZE))}"
            )
        if len(candidates) == 0:
            raise UsageError(f"the grid gives no value for {name}")
    settings = []
    for combination in product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        size = values.get(CHUNK_SIZE, chunk_size)
        PrefillConfig(batch_size=size, chunk_size=size)  # checks the size
        own = {name: value for name, value in values.items() if name in known}
        varied = replace(attention, **own).clamped(size)
        settings.append(Setting(values=values, attention=varied, chunk_size=size))
    return settings


def evaluate_ablation(
    llm: LLM,
    text: str,
    grid: Mapping[str, Sequence[Any]],
    *,
    context_size: int = DEFAULT_CONTEXT,
    windows: int | None = 1,
    skip: int = DEFAULT_SKIP,
    on_progress: OnProgress | None = None,
) -> AblationReport:
    """Measures every combination of ``grid`` over the attention of ``llm``.

    A window is one batch, read densely once for all settings. The range shown is that of the
    tokens after ``skip`` if a window has it, else all. ``on_progress("evaluate", done, total)``
    counts tokens. Raises UsageError as ``expand_grid`` and ``cut_windows`` do.
    """
    tokens = cut_windows(llm, text, context_size, windows)
    llm.profile_budgets(tokens[0])
    settings = expand_grid(llm.attention, llm.chunk_size, grid)
    dense = llm.start_runner(
        context_size,
        attention=DenseConfig(),
        prefill=_one_batch(context_size, llm.chunk_size),
        all_rows=True,
    )
    comparer = WindowComparer(dense)
    scores: list[list[TokenScores]] = [[] for _ in settings]
    pairs = [0] * len(settings)
    progress = Progress(on_progress, tokens.size * len(settings))
    for window in tokens:
        for index, setting in enumerate(settings):
            sparse = llm.start_runner(
                context_size,
                attention=setting.attention,
                prefill=_one_batch(context_size, setting.chunk_size),
                all_rows=True,
            )
            scores[index].append(comparer.compare(sparse, window))
            pairs[index] += sparse.pairs_computed
            progress.advance(len(window))
    results = tuple(
        AblationResult(
            setting=_naming_budget(llm, setting, context_size),
            keys_per_query=n_pairs / tokens.size,
            ranges=summarise_ranges(window_scores, context_size, skip),
        )
        for setting, window_scores, n_pairs in zip(settings, scores, pairs, strict=True)
    )
    names = [quality.range for quality in results[0].ranges]
    return AblationReport(
        model=llm.model_path.name,
        context=context_size,
        n_windows=len(tokens),
        dense_keys_per_query=dense.pairs_dense / context_size,
        range_name=f"after {skip}" if f"after {skip}" in names else "all",
        results=results,
    )


def _naming_budget(llm: LLM, setting: Setting, context_size: int) -> Setting:
    """With the budget that was chosen for the windows, if the setting says none."""
    resolved = llm.resolve_attention(context_size, setting.attention)
    return replace(setting, attention=setting.attention.naming_budget(resolved))


def _one_batch(context_size: int, chunk_size: int) -> PrefillConfig:
    """A batch that holds the whole window."""
    n_chunks = -(-context_size // chunk_size)
    return PrefillConfig(batch_size=n_chunks * chunk_size, chunk_size=chunk_size)
