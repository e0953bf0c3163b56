"""Measures what every KV head loses where generated tokens read few of a prompt's keys.

In one dense read of a text, as ``LayerProbe`` does it of prompts. Runs that limit one head after
the other rank heads alike (docs/quality.md), and take the longer the more heads there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..attention.headwise import HeadwiseConfig
from .calibration import AddedErrors, Floats, headwise_attention

if TYPE_CHECKING:
    from ..runners.native import NativeModel

# What a prompt's queries read here, whose outputs nobody looks at.
_READ_KEYS = 16


class DecodeProbe:
    """Decodes the end of a text in one layer after the other, and notes the KV heads' errors.

    It is an ``on_attention`` of a dense prefill call of all ``n_tokens``: those from ``n_prompt``
    on are decoded as they stand, each reading of the prompt what generated tokens do where every
    KV head has so many ``keys``. ``errors`` [n_layers * n_kv_heads] are sums over these of
    |Wo_h (o_h - dense o_h)|^2, relative to those of |x|^2, with x the residual stream before the
    layer and Wo_h the columns of the output projection that read the head's group.
    """

    def __init__(
        self,
        model: NativeModel,
        n_tokens: int,
        n_prompt: int,
        keys: int,
        *,
        threads: int,
        rule: HeadwiseConfig,
    ) -> None:
        config = model.config
        self._head_dim = config.head_dim
        self._layers = config.layers
        self._n_prompt = n_prompt
        self._n_kv_heads = n_kv_heads = config.n_kv_heads
        self._added = AddedErrors(model, n_kv_heads)
        self.errors = np.zeros(config.n_layers * n_kv_heads)

        limits: dict[str, Any] = {"decode_from": n_prompt, "decode_budgets": [keys] * n_kv_heads}

        def make(n_heads: int, *, has_limits: bool) -> _core.ChunkedAttention:
            return headwise_attention(
                config,
                rule,
                [_READ_KEYS] * n_kv_heads,
                n_heads,
                n_prompt=n_prompt,
                max_context=n_tokens,
                chunk_size=rule.preferred_chunk_size,
                threads=threads,
                max_past=rule.max_past,
                **(limits if has_limits else {}),
            )

        counts = {layer.n_heads for layer in config.layers}
        self._attentions = {
            n: (make(n, has_limits=False), make(n, has_limits=True)) for n in counts
        }

    def __call__(
        self,
        layer: int,
        residual: Floats,
        q: Floats,
        k: Floats,
        v: Floats,
        attended: Floats | None,
    ) -> None:
        """Notes a layer's errors; what was ``attended`` to may have been rounded."""
        if self._layers[layer].window:
            return  # a layer with a window reads its window, whatever the policy
        heads = [rows.reshape(len(rows), -1, self._head_dim) for rows in (q, k, v)]
        attentions = self._attentions[self._layers[layer].n_heads]
        dense, limited = (self._decode(attention, heads) for attention in attentions)
        stream = float(np.square(residual[self._n_prompt :]).sum(dtype=np.float64))
        added = self._added.sum(limited - dense, self._added.products(layer))
        first = layer * self._n_kv_heads
        self.errors[first : first + self._n_kv_heads] = np.array(added) / stream

    def _decode(
        self, attention: _core.ChunkedAttention, heads: Sequence[Floats]
    ) -> NDArray[np.float32]:
        """Outputs [n, n_heads * head_dim] of the tokens behind the prompt."""
        n_prompt = self._n_prompt
        attention.reset()
        attention.run(0, *(rows[:n_prompt] for rows in heads), is_last=True)
        outputs = [
            attention.decode(0, *(rows[i : i + 1] for rows in heads)).reshape(-1)
            for i in range(n_prompt, len(heads[0]))
        ]
        return np.array(outputs)
