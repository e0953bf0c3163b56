"""Learns what the heads of a model need while a prompt is read: a cheap ``BudgetTable``.

It is a calibration at a quarter of the length: memory sets a quarter as large, of chunks half as
long, stand for those of a prompt of ``PROFILED_LENGTH`` tokens. Queries, keys and values are those
of the prompt's own prefill; of six sizes two are measured, on a sample of queries, and the error's
projections on a few random directions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from .._version import __version__
from ..attention.budget_table import BudgetTable
from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..attention.kept_profiles import PARTS, PROFILE_TOKENS
from ..runners.base import SessionShape
from .calibration import FIRST_QUERY, LEVELS, LayerProbe, n_table_heads
from .rounding_probe import RoundingProbe

if TYPE_CHECKING:
    from ..runners.native import NativeModel
    from .models import LoadedModel

PROFILED_LENGTH = 4 * PROFILE_TOKENS
PROFILE_CHUNK = 128
# Budgets of 1,536 keys make 6 to 8 % less error with all six, 4 to 5 % less with 256 as well.
MEASURED_LEVELS = (64, 1024)
N_DIRECTIONS = 32
QUERY_STEP = 4

Floats = NDArray[np.float32]


class PromptProfiler:
    """An ``on_attention`` of the first prefill call of a prompt, of ``PROFILE_TOKENS`` at least.

    ``n_known`` prompts were profiled before: the first is read dense and measured in all layers,
    later ones are sparse and measured in every ``PARTS``-th.
    """

    def __init__(self, model: LoadedModel, *, threads: int, n_known: int = 0) -> None:
        rule = HeadwiseConfig()
        scale = PROFILED_LENGTH // PROFILE_TOKENS
        self._config = model.config
        self._n_known = n_known
        self._probe = LayerProbe(
            cast("NativeModel", model),  # what shows its attention
            PROFILE_TOKENS,
            [level // scale for level in MEASURED_LEVELS],
            threads=threads,
            first_query=PROFILE_TOKENS // 2,
            rule=replace(rule, local=min(rule.local, PROFILE_CHUNK)),
            chunk_size=PROFILE_CHUNK,
            n_directions=N_DIRECTIONS,
            query_step=QUERY_STEP,
        )
        self._rounding = RoundingProbe(model.config, PROFILE_TOKENS, threads=threads)

    def __call__(
        self, layer: int, residual: Floats, q: Floats, k: Floats, v: Floats, attended: Floats
    ) -> None:
        """Measures a layer of the call, if it is its turn."""
        if self._n_known == 0:
            self._probe(layer, residual, q, k, v, attended)
            self._rounding(layer, q, k, v, attended)
        elif layer % PARTS == self._n_known % PARTS:
            self._probe(layer, residual, q, k, v, None)

    def table(self, n_prompt_tokens: int) -> BudgetTable | None:
        """What this prompt measured, without losses; None if its numbers are not finite."""
        errors = _interpolate(self._probe.errors)
        if self._n_known == 0:
            _fill_last_layer(errors, len(errors) // self._config.n_layers)
        if not np.isfinite(errors).all():
            return None
        config = self._config
        return BudgetTable(
            model=f"profile of {PROFILE_TOKENS} tokens",
            fingerprint=config.fingerprint,
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            n_heads=n_table_heads(config),
            chunk_size=PROFILE_CHUNK,
            length=PROFILE_TOKENS,
            mean_past=float(np.mean(np.arange(FIRST_QUERY, PROFILED_LENGTH))),
            levels=LEVELS,
            errors=tuple(tuple(map(float, row)) for row in errors),
            texts=(f"prompt of {n_prompt_tokens} tokens",),
            version=__version__,
            prompts=1,
            rounding_error=self._rounding.error_percent,
        )


def _interpolate(measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors at ``LEVELS`` [n, 6] from those at ``MEASURED_LEVELS`` [n, 2].

    Logarithms of errors go linearly with those of sizes between two that were measured. Rows of
    zeros stay so.
    """
    smallest = np.finfo(np.float32).tiny
    logs = np.log(np.maximum(measured, smallest))
    x, known = np.log(LEVELS), np.log(MEASURED_LEVELS)
    errors = np.exp([np.interp(x, known, row) for row in logs])
    return np.where(measured.any(axis=1, keepdims=True), errors, 0.0)


def _fill_last_layer(errors: NDArray[np.float64], n_layer_heads: int) -> None:
    """Of a prompt it attends for the last token only, and is not shown.

    What evaluations, which need all its rows, then get is what the last layer before it has.
    """
    if not errors[-n_layer_heads:].any():
        rows = [
            i for i in range(0, len(errors), n_layer_heads) if errors[i : i + n_layer_heads].any()
        ]
        if rows:
            errors[-n_layer_heads:] = errors[rows[-1] : rows[-1] + n_layer_heads]


def example_text() -> str:
    """Python's manual, which comes with every Python: English about code, with examples.

    What a profile is made of where there is no prompt yet (docs/quality.md has what that gives).
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def profile_shape(threads: int) -> SessionShape:
    """The sizes of the session that ``profile_prompt`` takes for a moment."""
    return SessionShape(
        max_context=PROFILE_TOKENS,
        batch_size=PROFILE_TOKENS,
        chunk_size=PROFILE_TOKENS,
        cache_type="f16",
        threads=threads,
    )


def profile_prompt(
    model: LoadedModel, tokens: NDArray[np.int32], *, threads: int
) -> BudgetTable | None:
    """What the first ``PROFILE_TOKENS`` of ``tokens`` [n] say, read for nothing else.

    ``tokens`` must be at least as many. None for a model whose numbers are not finite.
    """
    profiler = PromptProfiler(model, threads=threads)
    runner = cast("NativeModel", model).start_session(DenseConfig(), profile_shape(threads))
    runner.prefill(tokens[:PROFILE_TOKENS], is_last=True, on_attention=profiler)
    return profiler.table(len(tokens))
