"""Makes the budget table of a model: errors per head, and the loss that the budgets lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .._version import __version__
from ..attention.base import require_measurable
from ..attention.budget_table import BudgetTable
from ..attention.dense import DenseConfig
from ..attention.head_budgets import default_budget
from ..attention.headwise import HeadwiseConfig
from ..engine.calibration import FIRST_QUERY, LEVELS, measure_head_errors, n_table_heads
from ..errors import ResourceError, UsageError
from .calibration_windows import Windows, make_long_windows, make_windows
from .comparison import score_window
from .decode_calibration import (
    LEAST_LENGTH,
    count_decode_steps,
    find_decode,
    require_decodable,
)
from .long_texts import make_window
from .prefill_calibration import count_prefill_steps, find_prefill
from .progress import Progress
from .rounding_calibration import count_rounding_steps, measure_rounding

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM

DEFAULT_LENGTH = 4096
# Mean budgets whose perplexity loss is measured, for --max-loss.
MEASURED_BUDGETS = (512, 768, 1024, 1280)
# As many measured queries as skipped ones.
_MIN_LENGTH = 2 * FIRST_QUERY
# Kinds of ``long_texts`` that are read besides the manual and a module, by a seed of their own.
_LOOK_UPS = ("dialogue", "facts", "pairs")
_SEED = 1000


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A window of tokens [n] of a text called ``name``; queries before ``first_query`` are not
    measured."""

    name: str
    tokens: NDArray[np.int32]
    first_query: int = FIRST_QUERY


def default_texts(llm: LLM, length: int) -> list[CalibrationText]:
    """What is read when the user gives no texts.

    The manual and a module of Python, which come with every Python: prose and code together keep a
    table from fitting one kind. Then what asks for its own beginning: half of each of them and the
    same again, key-value pairs, facts, a dialogue. Heads that copy and look up show there only.
    """
    import argparse
    import inspect

    from ..engine.profile import example_text

    plain = {
        "Python's manual": example_text(),
        "argparse": inspect.getsource(argparse),
    }
    texts = [CalibrationText(name, _first_tokens(llm, t, length)) for name, t in plain.items()]
    half = length // 2
    texts += [
        CalibrationText(
            f"{text.name}, half of it twice",
            np.concatenate([text.tokens[: length - half], text.tokens[:half]]),
            max(FIRST_QUERY, length - half),
        )
        for text in texts
    ]
    for kind in _LOOK_UPS:
        window = make_window(llm, kind, length, seed=_SEED)
        first = FIRST_QUERY if kind == "dialogue" else max(FIRST_QUERY, half)
        texts.append(CalibrationText(kind, window, first))
    return texts


def calibrate(
    llm: LLM,
    texts: Sequence[str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    decode: bool | None = None,
    on_progress: OnProgress | None = None,
) -> BudgetTable:
    """A table from the first ``length`` tokens of every text, errors averaged over the texts.

    Without texts those of ``default_texts`` are read. Losses are means over the same windows: they
    say how budgets compare, and are a little lower than on other text. What products of attention
    in 8 bits lose is measured where there are any. What prompts lose on other windows of every kind
    of text, under the guard, is measured where there are such windows. So is what generated tokens
    lose, with as many keys as a default run has and more if those lose too much, unless ``decode``
    is False; by default where the texts suffice for it and memory does.
    ``on_progress("calibrate", done, total)`` counts steps of equal weight.

    Raises UsageError for a text or a length that is too short and a model whose heads cannot be
    measured, and ResourceError when the sessions do not fit in memory.
    """
    if length < _MIN_LENGTH:
        raise UsageError(
            f"calibration needs windows of at least {_MIN_LENGTH} tokens, got {length}; "
            "use a larger --length"
        )
    model = llm.model
    require_measurable(llm.config, "calibration")
    if not model.shows_attention:
        raise UsageError(
            "calibration needs to know which projections follow the attention, and the graph of "
            "this ONNX model has other operators there; calibrate its GGUF file and give that "
            "table by --budget-table, or give --budget, for all heads the same"
        )
    if texts:
        windows = [
            CalibrationText(f"text {i + 1}", _first_tokens(llm, text, length))
            for i, text in enumerate(texts)
        ]
    else:
        windows = default_texts(llm, length)
    fresh = _fresh_windows(llm, length, is_asked_for=bool(decode))
    long = make_long_windows(llm, 2 * length) if fresh else {}
    decoded = fresh if decode is not False and length >= LEAST_LENGTH else {}
    config = llm.config
    n_steps = len(windows) * (config.n_layers + len(MEASURED_BUDGETS) + 1)
    n_steps += count_rounding_steps(llm, len(windows))
    n_steps += count_prefill_steps(fresh, long, len(MEASURED_BUDGETS))
    n_steps += count_decode_steps(decoded)
    progress = Progress(on_progress, n_steps, stage="calibrate")
    measured = [
        measure_head_errors(
            model,
            window.tokens,
            threads=llm.threads,
            first_query=window.first_query,
            on_layer=lambda *_: progress.advance(),
        )
        for window in windows
    ]
    errors = np.mean([result.errors for result in measured], axis=0)
    table = BudgetTable(
        model=llm.model_path.name,
        fingerprint=config.fingerprint,
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        n_heads=n_table_heads(config),
        chunk_size=HeadwiseConfig.preferred_chunk_size,
        length=length,
        mean_past=measured[0].mean_past,
        levels=LEVELS,
        errors=tuple(tuple(map(float, row)) for row in errors),
        texts=tuple(f"{window.name}: {length} tokens" for window in windows),
        version=__version__,
    )
    losses = _measure_losses(llm, table, [window.tokens for window in windows], progress)
    by_name = {window.name: [window.tokens] for window in windows}
    rounding = measure_rounding(llm, by_name, FIRST_QUERY, on_step=progress.advance)
    table = replace(table, losses=losses, rounding=rounding)
    if fresh:
        prefill = find_prefill(llm, table, fresh, long, on_step=progress.advance)
        table = replace(table, prefill=prefill)
    budget = default_budget(table) if decoded else None
    if budget is None:
        return table
    try:
        return replace(table, decode=find_decode(llm, table, budget, decoded, progress.advance))
    except ResourceError:
        if decode:
            raise
        return table  # the work of minutes, and decode is dense without it


def _fresh_windows(llm: LLM, length: int, *, is_asked_for: bool) -> Windows:
    """Those of ``make_windows``; none where the texts do not suffice and nobody asked for them.

    Raises UsageError where decode ``is_asked_for`` and cannot be measured.
    """
    try:
        if is_asked_for:
            require_decodable(length)
        return make_windows(llm, length)
    except UsageError:
        if is_asked_for:
            raise
        return {}


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
    dense = llm.start_runner(length, attention=DenseConfig(), all_rows=True)
    differences: dict[int, list[NDArray[np.float64]]] = {budget: [] for budget in MEASURED_BUDGETS}
    for window in windows:
        dense_nll = score_window(dense, window, first=FIRST_QUERY)
        progress.advance()
        for budget, parts in differences.items():
            attention = HeadwiseConfig(
                budgets=table.budgets(budget), by_query_head=table.n_heads > 0
            )
            sparse = llm.start_runner(length, attention=attention, all_rows=True)
            parts.append(score_window(sparse, window, first=FIRST_QUERY) - dense_nll)
            progress.advance()
    return {
        budget: round(100 * float(np.expm1(np.concatenate(parts).mean())), 3)
        for budget, parts in differences.items()
    }
