"""Float64 reference of the decoder, read from a GGUF file by the `gguf` package.

It knows the architectures of FAMILIES. Which norms a model has is read off its tensors.

Query and key rows are used in the order of the file, where the two elements of a rotated
pair are neighbours (interleaved), or reordered to the half-split layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.reference.cached_rows import stored
from tests.reference.dense import DenseLayer
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
    """Sizes and constants of the model.

    `rope_inv_freq` and that of layers with a window have one entry per rotated pair, already
    scaled; `windows` has one entry per layer.
    """

    n_layers: int
    model_dim: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    rope_inv_freq: Array
    sliding_inv_freq: Array
    windows: tuple[int | None, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    has_gelu: bool = False
    is_interleaved: bool = True
    n_experts_used: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """What no tensor or key of a file tells.

    Attributes:
        is_interleaved: the two elements of a rotated pair are neighbours in the file.
        window_period: every so many layers one has no window; 0: all have one.
        sliding_base: RoPE base of layers with a window, which have no scaling; None: as others.
        has_gelu: the gate is a GELU, and embeddings are multiplied by sqrt(model_dim).
    """

    is_interleaved: bool = False
    window_period: int = 0
    sliding_base: float | None = None
    has_gelu: bool = False


FAMILIES = {
    "llama": Family(is_interleaved=True),
    "granite": Family(is_interleaved=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3moe": Family(),
    "phi3": Family(),
    "olmo2": Family(window_period=4, sliding_base=10000.0),
    "gemma2": Family(window_period=2, has_gelu=True),
    "gemma3": Family(window_period=6, sliding_base=10000.0, has_gelu=True),
}


def _split_fused(
    weights: dict[str, NDArray[np.float32]], config: ReferenceConfig
) -> dict[str, NDArray[np.float32]]:
    """Weights with Q, K, V and gate, up as matrices of their own."""
    split = dict(weights)
    for layer in range(config.n_layers):
        prefix = f"blk.{layer}."
        qkv = split.pop(f"{prefix}attn_qkv.weight")
        q_dim = split[f"{prefix}attn_output.weight"].shape[1]
        parts = np.split(qkv, [q_dim, q_dim + (len(qkv) - q_dim) // 2])
        gate_up = np.split(split.pop(f"{prefix}ffn_up.weight"), 2)
        names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        for name, part in zip(names, (*parts, *gate_up), strict=True):
            split[f"{prefix}{name}.weight"] = part
    return split


def _name_experts(weights: dict[str, NDArray[np.float32]]) -> None:
    """Makes matrices ``ffn_up_exps.3.weight`` of the stacks ``ffn_up_exps.weight``."""
    for name in [name for name in weights if name.endswith("_exps.weight")]:
        for index, matrix in enumerate(weights.pop(name)):
            weights[name.replace(".weight", f".{index}.weight")] = matrix


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
    """Weights and sizes of a model, immutable.

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
        """Reads a GGUF file of one of the FAMILIES."""
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

        architecture = str(value("general.architecture"))
        family = FAMILIES[architecture]

        def number(key: str, default: float | None = None) -> float:
            return float(value(f"{architecture}.{key}", default))

        n_layers = int(number("block_count"))
        model_dim = int(number("embedding_length"))
        # Heads are counted by the rows of their matrices: layers may differ.
        n_heads = np.ravel(value(f"{architecture}.attention.head_count"))[0]
        head_dim = int(number("attention.key_length", model_dim // n_heads))
        rotary_dim = int(number("rope.dimension_count", head_dim))
        base = number("rope.freq_base", 10000.0)
        steps = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        inv_freq = base**-steps
        scaling = value(f"{architecture}.rope.scaling.type", "none")
        if scaling == "linear":
            inv_freq = inv_freq / number("rope.scaling.factor")
        elif scaling != "none":
            raise ValueError(f"the reference decoder does not know RoPE scaling {scaling!r}")
        if "rope_freqs.weight" in weights:
            inv_freq = inv_freq / weights["rope_freqs.weight"].astype(np.float64)
        sliding_inv_freq = inv_freq
        if family.sliding_base is not None:
            sliding_inv_freq = number("rope.freq_base_swa", family.sliding_base) ** -steps
        window = int(number("attention.sliding_window", 0.0))
        period = int(number("attention.sliding_window_pattern", family.window_period))
        windows = tuple(
            window if window and (period == 0 or layer % period < period - 1) else None
            for layer in range(n_layers)
        )
        width_scale = model_dim**0.5 if family.has_gelu else 1.0
        config = ReferenceConfig(
            n_layers=n_layers,
            model_dim=model_dim,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_inv_freq=inv_freq,
            sliding_inv_freq=sliding_inv_freq,
            windows=windows,
            attention_scale=number("attention.scale", head_dim**-0.5),
            embedding_scale=number("embedding_scale", width_scale),
            residual_scale=number("residual_scale", 1.0),
            logit_scale=1.0 / number("logit_scale", 1.0),
            attention_soft_cap=number("attn_logit_softcapping", 0.0) or None,
            logit_soft_cap=number("final_logit_softcapping", 0.0) or None,
            has_gelu=family.has_gelu,
            is_interleaved=family.is_interleaved,
            n_experts_used=int(number("expert_used_count", 0.0)),
        )
        _name_experts(weights)
        if "blk.0.attn_qkv.weight" in weights:
            weights = _split_fused(weights, config)
        return cls(config, weights, quantised)

    def start(
        self,
        make_layer: Callable[..., AttentionLayer],
        *,
        rope_layout: RopeLayout = "interleaved",
        quantise_activations: bool = False,
        cache_type: str = "f64",
    ) -> DecoderRun:
        """Begins a prompt.

        Args:
            make_layer: builds the attention state of a layer without a window, from its scale
                and soft_cap.
            rope_layout: order of the query and key rows inside the computation; files that are
                in half-split order stay as they are.
            quantise_activations: round the inputs of block-quantised matrices to 8 bits per
                block of 32, as the integer kernels do; everything else stays exact.
            cache_type: type that keys and values are rounded to, see `stored`.
        """
        return DecoderRun(
            self,
            [self._make_layer(make_layer, window) for window in self.config.windows],
            rope_layout=rope_layout if self.config.is_interleaved else "half_split",
            quantise_activations=quantise_activations,
            cache_type=cache_type,
        )

    def _make_layer(
        self, make_layer: Callable[..., AttentionLayer], window: int | None
    ) -> AttentionLayer:
        options = {
            "scale": self.config.attention_scale,
            "soft_cap": self.config.attention_soft_cap,
        }
        return make_layer(**options) if window is None else DenseLayer(window=window, **options)


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
        cache_type: str,
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
        config = self._decoder.config
        x = weights["token_embd.weight"][np.asarray(tokens)].astype(np.float64)
        x = x * config.embedding_scale
        positions = np.arange(self.position, self.position + len(tokens))[:, None]
        for layer_idx, layer in enumerate(self.layers):
            prefix = f"blk.{layer_idx}."
            has_window = config.windows[layer_idx] is not None
            inv_freq = config.sliding_inv_freq if has_window else config.rope_inv_freq
            branch = self._attention_block(prefix, x, positions * inv_freq, attention(layer))
            x = x + config.residual_scale * self._norm(prefix + "post_attention_norm", branch)
            branch = self._ffn_block(prefix, x)
            x = x + config.residual_scale * self._norm(prefix + "post_ffw_norm", branch)
        self.position += len(tokens)
        output = "output" if "output.weight" in weights else "token_embd"
        logits = self._linear(output, self._norm("output_norm", x)) * config.logit_scale
        cap = config.logit_soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _attention_block(
        self,
        prefix: str,
        x: Array,
        angles: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Array:
        normed = self._norm(prefix + "attn_norm", x)
        q, k, v = (self._heads(f"{prefix}attn_{name}", normed) for name in "qkv")
        q = rotate(self._ordered(q), angles, self._rope_layout)
        k = rotate(self._ordered(k), angles, self._rope_layout)
        k, v = (stored(rows, self._cache_type) for rows in (k, v))
        output = attend(q, k, v)
        return self._linear(prefix + "attn_output", output.transpose(1, 0, 2).reshape(len(x), -1))

    def _ffn_block(self, prefix: str, x: Array) -> Array:
        normed = self._norm(prefix + "ffn_norm", x)
        if self._decoder.config.n_experts_used:
            return self._mix_experts(prefix, normed)
        return self._feed_forward(prefix, "", normed)

    def _mix_experts(self, prefix: str, x: Array) -> Array:
        """The experts of highest probability, weighted by what they have of their sum."""
        logits = self._linear(prefix + "ffn_gate_inp", x)
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for row, probability in enumerate(probabilities):
            chosen = np.argsort(-probability)[: self._decoder.config.n_experts_used]
            for expert in chosen:
                output = self._feed_forward(prefix, f"_exps.{expert}", x[row : row + 1])[0]
                out[row] += probability[expert] / probability[chosen].sum() * output
        return out

    def _feed_forward(self, prefix: str, suffix: str, normed: Array) -> Array:
        gate = self._linear(f"{prefix}ffn_gate{suffix}", normed)
        up = self._linear(f"{prefix}ffn_up{suffix}", normed)
        if self._decoder.config.has_gelu:
            u = np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)
            activated = 0.5 * gate * (1.0 + np.tanh(u))
        else:
            activated = gate / (1.0 + np.exp(-gate))
        return self._linear(f"{prefix}ffn_down{suffix}", activated * up)

    def _norm(self, name: str, x: Array) -> Array:
        """RMS norm of groups of as many elements as the weight has; x if there is no weight."""
        if name + ".weight" not in self._decoder.weights:
            return x
        weight = self._decoder.weights[name + ".weight"].astype(np.float64)
        groups = x.reshape(*x.shape[:-1], -1, len(weight))
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
        normed = groups / np.sqrt(mean_square + self._decoder.config.norm_eps) * weight
        return normed.reshape(x.shape)

    def _linear(self, name: str, x: Array) -> Array:
        """x [n, cols] times the rows of a matrix, plus its bias if the file has one."""
        weights = self._decoder.weights
        stored = re.sub(r"_exps\.\d+", "_exps", name) + ".weight"
        if self._quantise_activations and stored in self._decoder.quantised:
            x = dequantise_q8_rows(*quantise_q8_rows(x))
        out = x @ weights[name + ".weight"].astype(np.float64).T
        bias = weights.get(name + ".bias")
        return out if bias is None else out + bias

    def _heads(self, name: str, x: Array) -> Array:
        """Projection as [n_heads, n, head_dim], normed if the model does that."""
        rows = self._norm(name + "_norm", self._linear(name, x))
        return rows.reshape(len(x), -1, self._decoder.config.head_dim).transpose(1, 0, 2)

    def _ordered(self, x: Array) -> Array:
        """Puts the elements of each head into the layout that this run rotates in."""
        config = self._decoder.config
        if self._rope_layout == "interleaved" or not config.is_interleaved:
            return x
        return x[..., half_split_row_order(1, config.head_dim, config.rotary_dim)]
