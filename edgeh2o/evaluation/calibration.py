"""Makes the budget table of a model: errors per KV head, and the loss that the budgets lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..attention.base import require_equal_kv_heads
from ..attention.budget_table import BudgetTable
from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..engine.calibration import FIRST_QUERY, LEVELS, measure_head_errors
from ..errors import UsageError
from .comparison import WindowComparer
from .progress import Progress

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM

DEFAULT_LENGTH = 4096
# Mean budgets whose perplexity loss is measured, for --max-loss.
MEASURED_BUDGETS = (384, 512, 640, 768, 896, 1152)
# As many measured queries as skipped ones.
_MIN_LENGTH = 2 * FIRST_QUERY


def calibration_texts() -> list[str]:
    """The texts that are used when the user gives none: the manual and a module of Python.

    They come with every Python; prose and code together keep a table from fitting one kind.
    """
    import argparse
    import inspect
    from pydoc_data.topics import topics

    return ["\n".join(topics[name] for name in sorted(topics)), inspect.getsource(argparse)]


def calibrate(
    llm: LLM,
    texts: Sequence[str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    on_progress: OnProgress | None = None,
) -> BudgetTable:
    """A table from the first ``length`` tokens of every text, errors averaged over the texts.

    Losses are those of the same windows: they say how budgets compare, and are a little lower
    than on other text. ``on_progress("calibrate", done, total)`` counts steps of equal weight.

    Raises UsageError for a text or a length that is too short and a model whose layers differ in
    KV heads, and ResourceError when the
    sessions do not fit in memory.
    """
    if length < _MIN_LENGTH:
        raise UsageError(
            f"calibration needs windows of at least {_MIN_LENGTH} tokens, got {length}; "
            "use a larger --length"
        )
    model = llm.model
    require_equal_kv_heads(llm.config, "calibration", "its heads all get what --budget says")
    if not model.shows_attention:
        raise UsageError(
            "calibration needs the model as a GGUF file; ONNX models that `edgeh2o export-onnx` "
            "made of it use its table, others take it with --budget-table"
        )
    windows = [_first_tokens(llm, text, length) for text in texts or calibration_texts()]
    config = llm.config
    n_steps = len(windows) * (config.n_layers + len(MEASURED_BUDGETS) + 1)
    progress = Progress(on_progress, n_steps, stage="calibrate")
    measured = [
        measure_head_errors(
            model, window, threads=llm.threads, on_layer=lambda *_: progress.advance()
        )
        for window in windows
    ]
    errors = np.mean([result.errors for result in measured], axis=0)
    table = BudgetTable(
        model=llm.model_path.name,
        fingerprint=config.fingerprint,
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        chunk_size=HeadwiseConfig.preferred_chunk_size,
        length=length,
        mean_past=measured[0].mean_past,
        levels=LEVELS,
        errors=tuple(tuple(map(float, row)) for row in errors),
    )
    losses = _measure_losses(llm, table, windows, progress)
    return replace(table, losses=losses)


def _first_tokens(llm: LLM, text: str, length: int) -> NDArray[np.int32]:
    tokens = llm.tokenize(text, parse_special=False)
    if len(tokens) < length:
        raise UsageError(
            f"the text has {len(tokens)} tokens, too few for a window of {length}; "
            "give a longer text, or a smaller --length"
        )
    return np.array(tokens[:length], dtype=np.int32)


def _measure_losses(
    llm: LLM,
    table: BudgetTable,
    windows: Sequence[NDArray[np.int32]],
    progress: Progress,
) -> dict[int, float]:
    """Perplexity losses in percent over the tokens after the first ``FIRST_QUERY``."""
    length = table.length
    comparer = WindowComparer(llm.start_runner(length, attention=DenseConfig(), all_rows=True))
    differences: dict[int, list[NDArray[np.float64]]] = {budget: [] for budget in MEASURED_BUDGETS}
    for window in windows:
        progress.advance()
        for budget, parts in differences.items():
            attention = HeadwiseConfig(budgets=table.budgets(budget))
            sparse = llm.start_runner(length, attention=attention, all_rows=True)
            scores = comparer.compare(sparse, window)
            scores = scores.part(FIRST_QUERY, length - 1)
            parts.append(scores.sparse_nll - scores.dense_nll)
            progress.advance()
    return {
        budget: round(100 * float(np.expm1(np.concatenate(parts).mean())), 3)
        for budget, parts in differences.items()
    }
