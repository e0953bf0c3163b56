"""Products, norms and orders of the rows of one model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from tests.reference.quant import dequantise_q8_rows, quantise_q8_rows
from tests.reference.softmax_state import Array

from .reading import ReferenceConfig
from .rope import RopeLayout, half_split_row_order
from .weight_names import Weights

# Of the residual stream.
_NORMS = ("attn_norm", "ffn_norm", "output_norm")


class Rows:
    """What every block does with rows of activations, by the names of tensors.

    Attributes:
        config: sizes.
        weights: dequantised float32 arrays [rows, cols] or [n] by GGUF tensor name.
        rope_layout: order of the elements of queries and keys.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        weights: Weights,
        quantised: Mapping[str, str],
        *,
        rope_layout: RopeLayout,
        scale_block_of: Callable[[str], int] | None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.rope_layout: RopeLayout = rope_layout
        # Which adapter counts in the rows of the present call, from 1 on, 0 for none.
        self.adapters: NDArray[np.int64] | None = None
        self._quantised = quantised
        self._scale_block_of = scale_block_of

    def linear(self, name: str, x: Array) -> Array:
        """x [n, cols] times the rows of a matrix, its factor and its bias if the file has one."""
        weights = self.weights
        stored = re.sub(r"(_(?:ch)?exps)\.\d+", r"\1", name) + ".weight"
        if self._scale_block_of and stored in self._quantised:
            scale_block = self._scale_block_of(self._quantised[stored])
            x = dequantise_q8_rows(*quantise_q8_rows(x, scale_block))
        out = x @ weights[name + ".weight"].astype(np.float64).T
        if self.adapters is not None and name + ".lora_a" in weights:
            a, b = (weights[f"{name}.lora_{half}"].astype(np.float64) for half in "ab")
            for row, adapter in enumerate(self.adapters):
                out[row] += b[adapter] @ (a[adapter] @ x[row])
        out = out * weights.get(name + ".scale", np.float32(1.0)).astype(np.float64)
        bias = weights.get(name + ".bias")
        return out if bias is None else out + bias

    def norm(self, name: str, x: Array, *, eps: float | None = None) -> Array:
        """RMS norm of groups as long as the weight, or as its rows, of which each group has one; x
        if there is no weight.

        In some families it is LayerNorm: without the mean, and with a bias if there is one.
        """
        family, weight = self.config.family, self.weights.get(name + ".weight")
        if weight is None and (family.has_norm_weights or not name.endswith(_NORMS)):
            return x
        weight = np.ones(x.shape[-1]) if weight is None else weight.astype(np.float64)
        groups = x.reshape(*x.shape[:-1], -1, weight.shape[-1])
        if self.config.family.has_layer_norm:
            groups = groups - groups.mean(axis=-1, keepdims=True)
        bias = self.weights.get(name + ".bias", np.float32(0.0)).astype(np.float64)
        return (self.normalised(groups, eps=eps) * weight + bias).reshape(x.shape)

    def normalised(self, groups: Array, *, eps: float | None = None) -> Array:
        """Rows of a mean square of 1."""
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
        return groups / np.sqrt(mean_square + (self.config.norm_eps if eps is None else eps))

    def heads(self, layer: int, rows: Array) -> Array:
        """A projection [n, n_heads * head_dim] as [n_heads, n, head_dim]."""
        head_dim = self.config.head_dims[layer]
        return rows.reshape(len(rows), -1, head_dim).transpose(1, 0, 2)

    def ordered(self, x: Array, angles: Array) -> Array:
        """Puts the elements of each head into the layout that this run rotates in."""
        config = self.config
        if self.rope_layout == "interleaved" or not config.family.is_interleaved:
            return x.copy()
        return x[..., half_split_row_order(1, x.shape[-1], 2 * angles.shape[1])]
