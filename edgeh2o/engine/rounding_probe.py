"""What products of 8 bits change in the attention of a prompt, while it is read exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..attention.dense import DenseConfig
from ..model_config import DecoderConfig

if TYPE_CHECKING:
    from ..model_config import ModelConfig

Floats = NDArray[np.float32]
MANY_LAYERS = 8  # half of SmolLM2-135M's 30 tell as much as all; Gemma 3 270M has 3


class RoundingProbe:
    """Attends to the first ``n_tokens`` of a prompt in 8 bits too, layer by layer, densely.

    The second half of the queries counts. Layers with a window and those that are never rounded are
    left out, and of many others every second.
    """

    def __init__(self, config: ModelConfig, n_tokens: int, *, threads: int) -> None:
        is_rounded = isinstance(config, DecoderConfig) and config.latent is None
        is_rounded = is_rounded and "int8" in _core.attention_precisions()
        self._config = cast("DecoderConfig", config) if is_rounded else None
        self._layers = _measured_layers(self._config) if self._config else frozenset()
        self._n_tokens = n_tokens
        self._threads = threads
        self._attentions: dict[int, _core.ChunkedAttention] = {}
        self._errors: list[float] = []

    def __call__(self, layer: int, q: Floats, k: Floats, v: Floats, attended: Floats) -> None:
        """Notes what a layer's outputs are off by."""
        if self._config is None:
            return
        if layer not in self._layers:
            return
        n, n_heads = self._n_tokens, self._config.layers[layer].n_heads
        if n_heads not in self._attentions:
            self._attentions[n_heads] = self._make(self._config, n_heads)
        attention = self._attentions[n_heads]
        attention.reset()
        heads = [part[:n].reshape(n, -1, self._config.head_dim) for part in (q, k, v)]
        rounded = attention.run(0, *heads, is_last=True).reshape(n, -1)
        exact = attended[n // 2 : n]
        size = np.square(exact).sum(dtype=np.float64)
        off = np.square(rounded[n // 2 :] - exact).sum(dtype=np.float64)
        self._errors.append(float(off / size))

    @property
    def error_percent(self) -> float | None:
        """The root of the layers' mean squared relative error; None if nothing was measured."""
        error = 100 * float(np.sqrt(np.mean(self._errors))) if self._errors else np.nan
        return error if np.isfinite(error) else None

    def _make(self, config: DecoderConfig, n_heads: int) -> _core.ChunkedAttention:
        return _core.ChunkedAttention(
            _core.dense_policy(),
            n_heads,
            config.n_kv_heads,
            config.head_dim,
            chunk_size=min(DenseConfig.preferred_chunk_size, self._n_tokens),
            batch_size=self._n_tokens,
            max_context=self._n_tokens,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            threads=self._threads,
            precision="int8",
        )


def _measured_layers(config: DecoderConfig) -> frozenset[int]:
    rounded = [
        index
        for index, layer in enumerate(config.layers)
        if not (layer.window or layer.has_large_keys)
    ]
    return frozenset(rounded[:: 2 if len(rounded) >= MANY_LAYERS else 1])
