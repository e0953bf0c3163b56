"""Measures what every head loses with a small memory: the errors of a ``BudgetTable``.

The text is read dense once. On every layer's queries, keys and values the sparse rule runs with the
same budget for all heads, once per level, and the error of a head is what its difference from
the dense output adds to the residual stream. ``calibrate`` does that once per model; ``profile``
does a small part of it while a prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from .. import _core, _kernels
from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..runners.base import SessionShape

if TYPE_CHECKING:
    from ..layer_config import LatentHeads
    from ..model_config import DecoderConfig, ModelConfig
    from ..runners.native import NativeModel
    from .models import LoadedModel

# Keys of a memory set. Below 64 a memory holds little more than its neighbours.
LEVELS = (64, 128, 256, 448, 704, 1024)
# Queries whose past is shorter lose little, and would hide what later ones lose.
FIRST_QUERY = 1024

Floats = NDArray[np.float32]
# Of a prefill: (layer, residual, q, k, v, attended).
OnAttention = Callable[..., None]


def mean_past(first_query: int, n_tokens: int) -> float:
    """Earlier tokens that the queries from ``first_query`` on have in the mean."""
    return float(np.mean(np.arange(first_query, n_tokens)))


def n_table_heads(config: ModelConfig) -> int:
    """``BudgetTable.n_heads`` of what is measured of the model."""
    return config.n_heads if config.splits_groups else 0


@dataclass(frozen=True, slots=True)
class HeadErrors:
    """``errors`` [n_layers * n_layer_heads, n_levels], and the mean past of the measured queries.

    The heads are those of a table: query heads where the model ``splits_groups``, else KV heads.
    """

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
    read: Callable[[OnAttention], object] | None = None,
) -> HeadErrors:
    """Errors of ``tokens`` [n] with each level's budget in every head, if the model shows them.

    The error of head h is mean_i |Wo_h (o_sparse - o_dense)_ih|^2 / mean_i |x_i|^2 over the
    queries i >= ``first_query``, with x the residual stream before the layer and Wo_h the
    columns of the output projection that read the head, or a KV head's group. ``first_query`` must
    be below n; ``threads`` of the CPU share the work, ``chunk_size`` defaults to what the rule
    prefers. ``read(on_attention)`` reads the tokens densely, in one call with all rows of the last
    layer; by default a session of its own does.
    """
    rule = rule or HeadwiseConfig()
    probe = LayerProbe(
        cast("NativeModel", model),  # what shows its attention
        len(tokens),
        levels,
        threads=threads,
        first_query=first_query,
        rule=rule,
        chunk_size=chunk_size or rule.preferred_chunk_size,
    )
    (read or partial(read_densely, model, tokens, threads))(probe)
    return HeadErrors(probe.errors, mean_past(first_query, len(tokens)))


def read_densely(
    model: LoadedModel, tokens: NDArray[np.int32], threads: int, on_attention: OnAttention
) -> None:
    """Reads ``tokens`` [n] in one call, the last layer too, in a session of its own."""
    chunk = min(DenseConfig.preferred_chunk_size, len(tokens))
    shape = SessionShape(
        max_context=len(tokens),
        batch_size=-(-len(tokens) // chunk) * chunk,
        chunk_size=chunk,
        cache_type="f16",
        threads=threads,
        all_rows=True,
    )
    runner = cast("NativeModel", model).start_session(DenseConfig(), shape)
    runner.prefill(tokens, is_last=True, on_attention=on_attention)


class AddedErrors:
    """What differences of heads' outputs add to the residual stream: sums of |Wo_h d|^2.

    Of the ``n_layer_heads`` of a layer, which are its query heads or groups of them. With
    ``n_directions`` they are estimates: the means of (r Wo_h d)^2 over directions r of independent
    normal entries.
    """

    def __init__(self, model: NativeModel, n_layer_heads: int, *, n_directions: int = 0) -> None:
        config = model.config
        self._model = model
        self._n_layer_heads = n_layer_heads
        # Not NumPy's product, whose threads and ours would spin against each other.
        self._multiply = partial(_kernels.gemm_f32, _core.active_isa())
        self._layers = config.layers
        self._latent = config.latent
        # One head of all the queries' rows would make larger products than there are rows.
        self._has_grams = n_directions == 0 and config.latent is None
        rng = np.random.default_rng(0)
        size = (n_directions, config.model_dim)
        self._directions = (rng.standard_normal(size) / max(1, n_directions) ** 0.5).astype(
            np.float32
        )

    def sum(self, difference: Floats, products: Sequence[Floats]) -> list[float]:
        """Of every head, over the rows of ``difference`` [n, dims of a layer's output].

        ``products`` are those of the layer.
        """
        sums = []
        for head, product in enumerate(products):
            width = len(product)
            part = np.ascontiguousarray(difference[:, head * width : (head + 1) * width])
            outputs = self._multiply(part, product)
            other = part if self._has_grams else outputs
            sums.append(float(np.sum(outputs * other, dtype=np.float64)))
        return sums

    def products(self, layer: int) -> list[Floats]:
        """Per head, with its output weights W: W'W, or W', or W' times directions.

        |W d|^2 = d' (W'W) d: the head's own columns suffice.
        """
        weights = self._model.output_weights(layer)
        if len(self._directions):
            weights = self._multiply(self._directions, weights)
        if self._latent is not None:
            weights = self._of_rows(layer, weights, self._latent)
        parts = [np.ascontiguousarray(w) for w in np.split(weights, self._n_layer_heads, axis=1)]
        transposed = [np.ascontiguousarray(part.T) for part in parts]
        if not self._has_grams:
            return transposed
        return [self._multiply(*pair) for pair in zip(transposed, parts, strict=True)]

    def _of_rows(self, layer: int, weights: Floats, latent: LatentHeads) -> Floats:
        """Output weights [n, n_heads * value_dim] as those of the rows that attention gives."""
        n_heads = self._layers[layer].n_heads
        out = np.zeros((len(weights), n_heads, latent.row_dim), np.float32)
        for head, part in enumerate(np.split(weights, n_heads, axis=1)):
            values = self._model.dequantize(f"blk.{layer}.attn_v_b.{head}.weight")
            out[:, head, : latent.rank] = self._multiply(np.ascontiguousarray(part), values)
        return out.reshape(len(weights), -1)


def headwise_attention(
    config: DecoderConfig,
    rule: HeadwiseConfig,
    budgets: list[int | None],
    n_heads: int,
    *,
    n_prompt: int,
    max_context: int,
    chunk_size: int,
    threads: int,
    **settings: Any,
) -> _core.ChunkedAttention:
    """The attention of one layer of ``n_heads`` query heads, by ``rule`` with these budgets.

    It reads ``n_prompt`` tokens in a call; ``settings`` are more of ``_core.headwise_policy``.
    """
    policy = _core.headwise_policy(
        budgets,
        local=rule.local,
        sinks=rule.sinks,
        decay=rule.decay,
        page_size=rule.landmark_size,
        spread=rule.landmark_spread,
        **settings,
    )
    return _core.ChunkedAttention(
        policy,
        n_heads,
        config.n_kv_heads,
        config.head_dim,
        chunk_size=chunk_size,
        batch_size=-(-n_prompt // chunk_size) * chunk_size,
        max_context=max_context,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        threads=threads,
    )


class LayerProbe:
    """Runs the sparse rule on one layer after the other and notes the heads' errors.

    It is an ``on_attention`` of a prefill call of at least ``n_tokens`` tokens, and looks at that
    many of the first. Errors [n_layers * n_layer_heads, n_levels] are exact, or with
    ``n_directions`` the estimates of ``AddedErrors``. Of the queries from ``first_query`` on every
    ``query_step``-th counts.
    """

    def __init__(
        self,
        model: NativeModel,
        n_tokens: int,
        levels: Sequence[int],
        *,
        threads: int,
        first_query: int,
        rule: HeadwiseConfig,
        chunk_size: int,
        n_directions: int = 0,
        query_step: int = 1,
    ) -> None:
        config = model.config
        self._n_tokens = n_tokens
        self._measured = slice(first_query, n_tokens, query_step)
        self._head_dim = config.head_dim
        self._n_layer_heads = n_layer_heads = n_table_heads(config) or config.n_kv_heads
        self._layers = config.layers
        self._added = AddedErrors(model, n_layer_heads, n_directions=n_directions)

        def make(n_heads: int, budget: int | None) -> _core.ChunkedAttention:
            return headwise_attention(
                config,
                rule,
                [budget] * n_layer_heads,
                n_heads,
                n_prompt=n_tokens,
                max_context=n_tokens,
                chunk_size=chunk_size,
                threads=threads,
                by_query_head=n_table_heads(config) > 0,
            )

        counts = {layer.n_heads for layer in config.layers}
        self._attentions = {n: [make(n, level) for level in levels] for n in counts}
        self._dense = {n: make(n, None) for n in counts}
        self._outputs = {n: np.empty((2, n_tokens, n, config.head_dim), np.float32) for n in counts}
        self.errors = np.zeros((config.n_layers * n_layer_heads, len(levels)))

    def __call__(
        self,
        layer: int,
        residual: Floats,
        q: Floats,
        k: Floats,
        v: Floats,
        attended: Floats | None,
    ) -> None:
        """Notes a layer's errors; without ``attended`` what it attends to densely is computed."""
        if self._layers[layer].window:
            return  # a layer with a window reads its window, whatever the policy
        n_heads = self._layers[layer].n_heads
        measured = self._measured
        stream = float(np.square(residual[measured]).sum(dtype=np.float64))
        heads = [a[: self._n_tokens].reshape(self._n_tokens, -1, self._head_dim) for a in (q, k, v)]
        kept, out = self._outputs[n_heads]
        dense = self._run(self._dense[n_heads], heads, kept) if attended is None else attended
        first = layer * self._n_layer_heads
        products = self._added.products(layer)
        for level, attention in enumerate(self._attentions[n_heads]):
            difference = self._run(attention, heads, out)[measured] - dense[measured]
            for head, added in enumerate(self._added.sum(difference, products)):
                self.errors[first + head, level] = added / stream

    @staticmethod
    def _run(attention: _core.ChunkedAttention, heads: Sequence[Floats], out: Floats) -> Floats:
        attention.reset()
        output = attention.run(0, *heads, is_last=True, out=out)
        return output.reshape(len(output), -1)
