"""Makes the budget table of a model: errors per head, and the loss that the budgets lead to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .._version import __version__
from ..attention.base import require_measurable
from ..attention.budget_table import BudgetTable
from ..attention.head_budgets import default_budget
from ..attention.headwise import HeadwiseConfig
from ..engine.calibration import FIRST_QUERY, LEVELS, mean_past, n_table_heads
from ..errors import ResourceError, UsageError
from .calibration_notes import CalibrationNotes
from .calibration_windows import Windows, make_long_windows, make_windows
from .decode_calibration import (
    LEAST_LENGTH,
    count_decode_steps,
    find_decode,
    require_decodable,
)
from .long_texts import make_window
from .prefill_calibration import count_prefill_steps, find_prefill
from .progress import Progress
from .text_calibration import (
    MEASURED_BUDGETS,
    CalibrationText,
    TextMeter,
    TextReading,
    count_loss_steps,
    count_reading_steps,
    summarise_rounding,
)

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM

DEFAULT_LENGTH = 4096
# As many measured queries as skipped ones.
_MIN_LENGTH = 2 * FIRST_QUERY
# Kinds of ``long_texts`` that are read besides the manual and a module, by a seed of their own.
_LOOK_UPS = ("dialogue", "facts", "pairs")
_SEED = 1000


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
    notes_path: Path | None = None,
) -> BudgetTable:
    """A table from the first ``length`` tokens of every text, errors averaged over the texts.

    Without texts those of ``default_texts`` are read. Losses are means over the same windows: they
    say how budgets compare, and are a little lower than on other text. What products of attention
    in 8 bits lose is measured where there are any. What prompts lose on other windows of every kind
    of text, under the guard, is measured where there are such windows. So is what generated tokens
    lose, with as many keys as a default run has and more if those lose too much, unless ``decode``
    is False; by default where the texts suffice for it and memory does. Both are measured at twice
    the length too where the model was trained on it.
    ``on_progress("calibrate", done, total)`` counts steps of about equal weight; the total shrinks
    where fewer are needed than was thought. What was measured is kept in ``notes_path`` until the
    table is made: a call that was interrupted goes on from there.

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
    notes = CalibrationNotes(
        notes_path, _identify(llm, windows, *_texts_of(fresh), *_texts_of(long))
    )
    n_steps = count_reading_steps(llm, len(windows)) + count_loss_steps(len(windows))
    n_steps += count_prefill_steps(fresh, long, len(MEASURED_BUDGETS))
    if decoded:
        n_steps += count_decode_steps(decoded, long)
    progress = Progress(on_progress, n_steps * llm.config.n_layers, stage="calibrate")
    table = _measure_texts(llm, windows, progress, notes)
    if fresh:
        table = replace(table, prefill=find_prefill(llm, table, fresh, long, progress, notes))
    budget = default_budget(table) if decoded else None
    if budget is not None:
        try:
            found = find_decode(llm, table, budget, decoded, long, progress, notes)
            table = replace(table, decode=found)
        except ResourceError:
            if decode:
                raise
            # the work of minutes, and decode is dense without it
    notes.remove()
    return table


def _measure_texts(
    llm: LLM, texts: Sequence[CalibrationText], progress: Progress, notes: CalibrationNotes
) -> BudgetTable:
    """The table of the texts' errors, losses, and what rounding changes."""
    length = len(texts[0].tokens)
    meter = TextMeter(llm, length, notes)
    readings = meter.read(texts, progress)
    table = _table_of_errors(llm, texts, readings)
    losses = meter.measure_losses(table, texts, readings, progress)
    return replace(table, losses=losses, rounding=summarise_rounding(texts, readings))


def _table_of_errors(
    llm: LLM, texts: Sequence[CalibrationText], readings: Sequence[TextReading]
) -> BudgetTable:
    config, length = llm.config, len(texts[0].tokens)
    errors = np.mean([reading.errors for reading in readings], axis=0)
    return BudgetTable(
        model=llm.model_path.name,
        fingerprint=config.fingerprint,
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        n_heads=n_table_heads(config),
        chunk_size=HeadwiseConfig.preferred_chunk_size,
        length=length,
        mean_past=mean_past(texts[0].first_query, length),
        levels=LEVELS,
        errors=tuple(tuple(map(float, row)) for row in errors),
        texts=tuple(f"{text.name}: {length} tokens" for text in texts),
        version=__version__,
    )


def _identify(llm: LLM, texts: Sequence[CalibrationText], *windows: NDArray[np.int32]) -> str:
    """Names all that a measurement depends on."""
    run = (llm.isa, llm.device, llm.cache_type, llm.attention_precision, llm.prefill)
    model = (llm.model.fingerprint, llm.config)
    digest = hashlib.sha256(repr((__version__, LEVELS, run, model)).encode())
    for text in texts:
        digest.update(f"{text.name}, {text.first_query}".encode())
    for tokens in (*(text.tokens for text in texts), *windows):
        digest.update(tokens.tobytes())
    return digest.hexdigest()


def _texts_of(windows: Windows) -> list[NDArray[np.int32]]:
    return [window for texts in windows.values() for window in texts]


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
