"""Float64 reference of the llama-type decoder, read from a GGUF file by the `gguf` package.

Query and key rows are used in the order of the file, where the two elements of a rotated
pair are neighbours (interleaved), or reordered to the half-split layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.reference.pairs import chunk_bounds
from tests.reference.quant import dequantise_q8_rows, quantise_q8_rows
from tests.reference.softmax_state import Array

RopeLayout = Literal["interleaved", "half_split"]
Tokens = Sequence[int] | NDArray[np.integer]


class AttentionLayer(Protocol):
    """Attention state of one layer: `DenseLayer` or `H2OLayer`."""

    def prefill(self, q: Array, k: Array, v: Array) -> Array: ...

    def decode(self, q: Array, k: Array, v: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Sizes of the model; `rope_inv_freq` has one entry per rotated pair, already scaled."""

    n_layers: int
    model_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    rope_inv_freq: Array


def half_split_row_order(n_heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """Row i of the half-split layout is row order[i] of the interleaved one."""
    half = rotary_dim // 2
    pairs = np.arange(half)
    head = np.concatenate([2 * pairs, 2 * pairs + 1, np.arange(rotary_dim, head_dim)])
    return (np.arange(n_heads)[:, None] * head_dim + head).ravel()


def rotate(x: Array, angles: Array, layout: RopeLayout) -> Array:
    """Rotary embedding of x [n_heads, n, d] by angles [n, rotary_dim / 2]."""
    half = angles.shape[1]
    if layout == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    cos, sin = np.cos(angles), np.sin(angles)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


class ReferenceDecoder:
    """Weights and sizes of a llama-type model, immutable.

    Attributes:
        config: sizes.
        weights: dequantised float32 arrays [rows, cols] or [n] by GGUF tensor name.
        quantised: names of the tensors that the file stores in a block format.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        weights: dict[str, NDArray[np.float32]],
        quantised: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self.weights = weights
        self.quantised = quantised

    @classmethod
    def from_gguf(cls, path: Path) -> ReferenceDecoder:
        """Reads a GGUF file whose general.architecture is llama."""
        from gguf import GGMLQuantizationType, GGUFReader
        from gguf.quants import dequantize

        reader = GGUFReader(path)
        weights = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }
        floats = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}
        quantised = frozenset(
            tensor.name for tensor in reader.tensors if tensor.tensor_type not in floats
        )

        def value(key: str, default: float | str | None = None) -> float | str:
            field = reader.get_field(key)
            if field is not None:
                return field.contents()
            if default is None:
                raise KeyError(key)
            return default

        if value("general.architecture") != "llama":
            raise ValueError("the reference decoder knows only the llama architecture")
        n_heads = int(value("llama.attention.head_count"))
        model_dim = int(value("llama.embedding_length"))
        head_dim = int(value("llama.attention.key_length", model_dim // n_heads))
        rotary_dim = int(value("llama.rope.dimension_count", head_dim))
        inv_freq = float(value("llama.rope.freq_base", 10000.0)) ** (
            -np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        )
        scaling = value("llama.rope.scaling.type", "none")
        if scaling == "linear":
            inv_freq /= float(value("llama.rope.scaling.factor"))
        elif scaling != "none":
            raise ValueError(f"the reference decoder does not know RoPE scaling {scaling!r}")
        if "rope_freqs.weight" in weights:
            inv_freq /= weights["rope_freqs.weight"].astype(np.float64)
        config = ReferenceConfig(
            n_layers=int(value("llama.block_count")),
            model_dim=model_dim,
            n_heads=n_heads,
            n_kv_heads=int(value("llama.attention.head_count_kv", n_heads)),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")),
            rope_inv_freq=inv_freq,
        )
        return cls(config, weights, quantised)

    def start(
        self,
        make_layer: Callable[[], AttentionLayer],
        *,
        rope_layout: RopeLayout = "interleaved",
        quantise_activations: bool = False,
        cache_type: type[np.floating] = np.float64,
    ) -> DecoderRun:
        """Begins a prompt.

        Args:
            make_layer: builds the attention state of one layer.
            rope_layout: order of the query and key rows inside the computation.
            quantise_activations: round the inputs of block-quantised matrices to 8 bits per
                block of 32, as the integer kernels do; everything else stays exact.
            cache_type: type that keys and values are rounded to.
        """
        return DecoderRun(
            self,
            [make_layer() for _ in range(self.config.n_layers)],
            rope_layout=rope_layout,
            quantise_activations=quantise_activations,
            cache_type=cache_type,
        )


class DecoderRun:
    """One prompt in progress.

    Attributes:
        layers: attention state per layer.
        position: number of tokens read so far.
    """

    def __init__(
        self,
        decoder: ReferenceDecoder,
        layers: list[AttentionLayer],
        *,
        rope_layout: RopeLayout,
        quantise_activations: bool,
        cache_type: type[np.floating],
    ) -> None:
        self._decoder = decoder
        self._rope_layout: RopeLayout = rope_layout
        self._quantise_activations = quantise_activations
        self._cache_type = cache_type
        self.layers = layers
        self.position = 0

    def prefill(self, tokens: Tokens) -> Array:
        """Runs one logical batch layer by layer; returns logits [n_tokens, vocab_size]."""
        return self._run(tokens, lambda layer: layer.prefill)

    def prefill_chunk_major(self, tokens: Tokens, *, chunk_size: int) -> Array:
        """Runs the whole network chunk by chunk; must equal `prefill`."""
        bounds = chunk_bounds(len(tokens), chunk_size=chunk_size)
        return np.concatenate([self.prefill(tokens[start:stop]) for start, stop in bounds])

    def decode(self, token: int) -> Array:
        """Appends one token with full attention; returns logits [vocab_size]."""
        return self._run([token], lambda layer: layer.decode)[0]

    def _run(
        self,
        tokens: Tokens,
        attention: Callable[[AttentionLayer], Callable[[Array, Array, Array], Array]],
    ) -> Array:
        weights = self._decoder.weights
        x = weights["token_embd.weight"][np.asarray(tokens)].astype(np.float64)
        positions = np.arange(self.position, self.position + len(tokens))
        angles = positions[:, None] * self._decoder.config.rope_inv_freq
        for layer_idx, layer in enumerate(self.layers):
            prefix = f"blk.{layer_idx}."
            x = x + self._attention_block(prefix, x, angles, attention(layer))
            x = x + self._ffn_block(prefix, x)
        self.position += len(tokens)
        output = "output" if "output.weight" in weights else "token_embd"
        return self._linear(output, self._norm("output_norm", x))

    def _attention_block(
        self,
        prefix: str,
        x: Array,
        angles: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Array:
        config = self._decoder.config
        normed = self._norm(prefix + "attn_norm", x)
        q, k, v = (
            self._heads(prefix + name, normed, n_heads)
            for name, n_heads in (
                ("attn_q", config.n_heads),
                ("attn_k", config.n_kv_heads),
                ("attn_v", config.n_kv_heads),
            )
        )
        q = rotate(self._ordered(q), angles, self._rope_layout)
        k = rotate(self._ordered(k), angles, self._rope_layout)
        k, v = (rows.astype(self._cache_type).astype(np.float64) for rows in (k, v))
        output = attend(q, k, v)
        return self._linear(prefix + "attn_output", output.transpose(1, 0, 2).reshape(len(x), -1))

    def _ffn_block(self, prefix: str, x: Array) -> Array:
        normed = self._norm(prefix + "ffn_norm", x)
        gate = self._linear(prefix + "ffn_gate", normed)
        up = self._linear(prefix + "ffn_up", normed)
        return self._linear(prefix + "ffn_down", gate / (1.0 + np.exp(-gate)) * up)

    def _norm(self, name: str, x: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        weight = self._decoder.weights[name + ".weight"].astype(np.float64)
        return x / np.sqrt(mean_square + self._decoder.config.norm_eps) * weight

    def _linear(self, name: str, x: Array) -> Array:
        """x [n, cols] times the rows of a matrix, plus its bias if the file has one."""
        weights = self._decoder.weights
        if self._quantise_activations and name + ".weight" in self._decoder.quantised:
            x = dequantise_q8_rows(*quantise_q8_rows(x))
        out = x @ weights[name + ".weight"].astype(np.float64).T
        bias = weights.get(name + ".bias")
        return out if bias is None else out + bias

    def _heads(self, name: str, x: Array, n_heads: int) -> Array:
        """Projection as [n_heads, n, head_dim]."""
        return self._linear(name, x).reshape(len(x), n_heads, -1).transpose(1, 0, 2)

    def _ordered(self, x: Array) -> Array:
        """Puts the elements of each head into the layout that this run rotates in."""
        if self._rope_layout == "interleaved":
            return x
        config = self._decoder.config
        return x[..., half_split_row_order(1, config.head_dim, config.rotary_dim)]
