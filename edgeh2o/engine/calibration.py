"""Measures what every KV head loses with a small memory: the errors of a ``BudgetTable``.

The text is read dense once. On every layer's queries, keys and values the sparse rule runs with the
same budget for all heads, once per level, and the error of a head is what its difference from
the dense output adds to the residual stream. ``calibrate`` does that once per model; a model
without a table is profiled on the first tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from .. import _core, _kernels
from ..attention.budget_table import BudgetTable
from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..runners.base import SessionShape

if TYPE_CHECKING:
    from ..runners.native import NativeModel
    from .models import LoadedModel

# Keys of a memory set. Below 64 a memory holds little more than its neighbours.
LEVELS = (64, 128, 256, 448, 704, 1024)
# Queries whose past is shorter lose little, and would hide what later ones lose.
FIRST_QUERY = 1024

# A profile is a calibration at a quarter of the length: memory sets a quarter as large, of chunks
# half as long, stand for those of a prompt of PROFILED_LENGTH tokens.
PROFILE_TOKENS = 1024
PROFILED_LENGTH = 4 * PROFILE_TOKENS
PROFILE_CHUNK = 128

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadErrors:
    """``errors`` [n_layers * n_kv_heads, n_levels], and the mean past of the measured queries."""

    errors: NDArray[np.float64]
    mean_past: float


def measure_head_errors(
    model: LoadedModel,
    tokens: NDArray[np.int32],
    *,
    levels: Sequence[int] = LEVELS,
    threads: int,
    first_query: int = FIRST_QUERY,
    rule: HeadwiseConfig | None = None,
    chunk_size: int | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> HeadErrors:
    """Errors of ``tokens`` [n] with each level's budget in every head, if the model shows them.

    The error of head h is mean_i |Wo_h (o_sparse - o_dense)_ih|^2 / mean_i |x_i|^2 over the
    queries i >= ``first_query``, with x the residual stream before the layer and Wo_h the
    columns of the output projection that read the head's group. ``first_query`` must be below n;
    ``threads`` of the CPU share the work, ``chunk_size`` defaults to what the rule prefers.
    """
    rule = rule or HeadwiseConfig()
    native = cast("NativeModel", model)  # what shows its attention
    shape = SessionShape(
        max_context=len(tokens),
        batch_size=len(tokens),
        chunk_size=min(DenseConfig.preferred_chunk_size, len(tokens)),
        cache_type="f16",
        threads=threads,
        all_rows=True,
    )
    probe = _LayerProbe(
        native,
        shape,
        levels,
        first_query,
        rule,
        chunk_size or rule.preferred_chunk_size,
    )
    runner = native.start_session(DenseConfig(), shape)
    runner.prefill(tokens, is_last=True, on_layer=on_layer, on_attention=probe)
    return HeadErrors(probe.errors, float(np.mean(np.arange(first_query, len(tokens)))))


def profile_prompt(
    model: LoadedModel,
    tokens: NDArray[np.int32],
    rule: HeadwiseConfig | None = None,
    *,
    threads: int,
) -> BudgetTable:
    """A table without losses from the first ``PROFILE_TOKENS`` of ``tokens`` [n], n at least that.

    They are read once more for it, with several memory sizes: as much work as some thousand
    tokens of prefill. One text says less than a calibration does.
    """
    rule = rule or HeadwiseConfig()
    scale = PROFILED_LENGTH // PROFILE_TOKENS
    measured = measure_head_errors(
        model,
        tokens[:PROFILE_TOKENS],
        levels=[level // scale for level in LEVELS],
        threads=threads,
        first_query=PROFILE_TOKENS // 2,
        rule=replace(rule, local=min(rule.local, PROFILE_CHUNK)),
        chunk_size=PROFILE_CHUNK,
    )
    config = model.config
    return BudgetTable(
        model=f"profile of {PROFILE_TOKENS} tokens",
        fingerprint=config.fingerprint,
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        chunk_size=PROFILE_CHUNK,
        length=PROFILE_TOKENS,
        mean_past=float(np.mean(np.arange(FIRST_QUERY, PROFILED_LENGTH))),
        levels=LEVELS,
        errors=tuple(tuple(map(float, row)) for row in measured.errors),
    )


class _LayerProbe:
    """Runs the sparse rule on one layer after the other and notes the heads' errors."""

    def __init__(
        self,
        model: NativeModel,
        shape: SessionShape,
        levels: Sequence[int],
        first_query: int,
        rule: HeadwiseConfig,
        chunk_size: int,
    ) -> None:
        config = model.config
        self._model = model
        # Not NumPy's product, whose threads and ours would spin against each other.
        self._multiply = partial(_kernels.gemm_f32, _core.active_isa())
        self._first_query = first_query
        self._head_dim = config.head_dim
        self._n_kv_heads = config.n_kv_heads
        self._layers = config.layers
        self._attentions = {
            n_heads: [
                _core.ChunkedAttention(
                    _core.headwise_policy(
                        [level] * config.n_kv_heads,
                        local=rule.local,
                        sinks=rule.sinks,
                        decay=rule.decay,
                        page_size=rule.landmark_size,
                    ),
                    n_heads,
                    config.n_kv_heads,
                    config.head_dim,
                    chunk_size=chunk_size,
                    batch_size=-(-shape.max_context // chunk_size) * chunk_size,
                    max_context=shape.max_context,
                    scale=config.attention_scale,
                    threads=shape.threads,
                )
                for level in levels
            ]
            for n_heads in {layer.n_heads for layer in config.layers}
        }
        self.errors = np.zeros((config.n_layers * config.n_kv_heads, len(levels)))

    def __call__(
        self, layer: int, residual: Floats, q: Floats, k: Floats, v: Floats, attended: Floats
    ) -> None:
        measured = slice(self._first_query, None)
        if self._layers[layer].window:
            return  # a layer with a window reads its window, whatever the policy
        stream = float(np.square(residual[measured]).sum(dtype=np.float64))
        weights = self._model.dequantize(f"blk.{layer}.attn_output.weight")
        width = weights.shape[1] // self._n_kv_heads  # outputs of a head's group
        # |W d|^2 = d' (W'W) d: the group's own columns suffice.
        grams = [
            self._multiply(np.ascontiguousarray(part.T), np.ascontiguousarray(part))
            for part in np.split(weights, self._n_kv_heads, axis=1)
        ]
        heads = [array.reshape(len(array), -1, self._head_dim) for array in (q, k, v)]
        for level, attention in enumerate(self._attentions[self._layers[layer].n_heads]):
            attention.reset()
            output = attention.run(0, *heads, is_last=True).reshape(attended.shape)
            difference = (output - attended)[measured]
            for head, gram in enumerate(grams):
                part = np.ascontiguousarray(difference[:, head * width : (head + 1) * width])
                error = float(np.sum(self._multiply(part, gram) * part, dtype=np.float64))
                self.errors[layer * self._n_kv_heads + head, level] = error / stream
