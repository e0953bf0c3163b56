"""What a file of random weights in the shape of a real model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4:
    """Windows, the size of heads in layers with one, and inputs of layers per token.

    The last ``n_shared_kv`` layers read the keys and values of others and are twice as wide, but
    for Gemma 3n (``has_streams``), which has AltUp, LAuReL and gates that are cut off instead.
    """

    window: int
    window_period: int
    head_dim_sliding: int
    n_shared_kv: int
    token_input_dim: int
    has_streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Heads of the gated delta nets in all but every ``period``-th layer."""

    period: int
    n_key_heads: int
    n_value_heads: int
    head_dim: int

    @property
    def value_dim(self) -> int:
        return self.n_value_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.value_dim + 2 * self.n_key_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Heads of Mamba-2 in the layers without attention."""

    n_heads: int
    head_dim: int
    n_groups: int
    state_dim: int

    @property
    def inner_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner_dim + 2 * self.n_groups * self.state_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """Channels of Mamba-1 in the layers without attention."""

    n_channels: int
    state_dim: int
    step_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """That of QRWKV6 in all layers; ranks are those of shifts of tokens and of decays."""

    n_kv_heads: int
    head_dim: int
    shift_rank: int
    decay_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMix:
    """That of RWKV-7 in all layers, without gates and norms of heads, as ARWKV-7B has it."""

    head_dim: int
    decay_rank: int
    rate_rank: int
    value_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture in every layer; the width of each is the shape's ``ffn_dim``."""

    n_experts: int
    n_used: int
    has_biases: bool = False
    has_shared: bool = False  # one more, as wide, with a gate


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStreams:
    """Residual streams that are mixed, indexers that score blocks, and n-grams of a layer.

    ``ngram_rows`` are those of the table that each of ``n_ngram_heads`` hashes may name.
    """

    n_streams: int
    rank: int
    index_heads: int
    index_dim: int
    index_top_k: int
    block_tokens: int
    ngram_tokens: int
    n_ngram_heads: int
    ngram_taps: int
    ngram_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A model that makes vectors and writes none; its layers are those of its architecture.

    All but the last of ``window_period`` layers have a ``window``, of Gemma.
    """

    window: int = 0
    window_period: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and settings of a model.

    Attributes:
        rope_factor: of the scaling of Llama 3.1; None for none.
        trained_context: tokens from which it, or the YaRN of gpt-oss, scales.
        tied: the token embedding is also the output matrix.
        qk_norms: queries and keys are normed per head, or each as a whole ("projection").
        qkv_biases: Q, K and V have biases.
        experts: networks are mixtures of experts.
        window: of every other layer; with it the shape has what gpt-oss has, sinks and biases.
        gemma4: what Gemma 3n and 4 have beside these; their other norms, and scales of layers.
        attention_layers: the others have a convolution of ``n_conv_taps`` tokens; empty for all.
        delta_net: what Qwen3.5 has in most layers; its attention has a gate.
        mamba2: what the layers without attention have in Granite 4.0 H, which has no positions.
        mamba1: the same of Jamba.
        linear, time_mix: what all layers of QRWKV6 have, and of ARWKV; such shapes have no heads.
        mixed_streams: what Qwen3.8-Flash-Next has beside what Qwen3.5 has.
        rotary_dim: rotated elements of a head; None for all.
        encoder: of a model for vectors alone; None for others.
        n_drafting_layers: layers behind the others that guess tokens ahead (MTP), with attention.
    """

    architecture: str
    n_layers: int
    model_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    context_length: int
    rope_base: float
    norm_epsilon: float
    tied: bool
    rope_factor: float | None = None
    trained_context: int = 8192
    qk_norms: bool | Literal["projection"] = False
    qkv_biases: bool = False
    experts: Experts | None = None
    window: int | None = None
    gemma4: Gemma4 | None = None
    attention_layers: tuple[int, ...] = ()
    n_conv_taps: int = 0
    delta_net: DeltaNet | None = None
    mamba2: Mamba2 | None = None
    mamba1: Mamba1 | None = None
    linear: LinearAttention | None = None
    time_mix: TimeMix | None = None
    mixed_streams: MixedStreams | None = None
    rotary_dim: int | None = None
    encoder: Encoder | None = None
    n_drafting_layers: int = 0

    def attends(self, layer: int) -> bool:
        if (self.linear or self.time_mix) is not None:
            return False
        if layer >= self.n_layers:
            return True
        if self.delta_net is not None:
            return (layer + 1) % self.delta_net.period == 0
        return not self.attention_layers or layer in self.attention_layers

    def layer_sizes(self, layer: int) -> tuple[int, int, bool]:
        """Head size and feed-forward width of a layer, and whether it has keys of its own."""
        if self.gemma4 is None:
            return self.head_dim, self.ffn_dim, True
        has_keys = layer < self.n_layers - self.gemma4.n_shared_kv
        if self.gemma4.has_streams:  # files have keys for all
            return self.head_dim, self.ffn_dim, True
        head_dim = self.gemma4.head_dim_sliding if self.has_window(layer) else self.head_dim
        return head_dim, self.ffn_dim if has_keys else 2 * self.ffn_dim, has_keys

    def has_window(self, layer: int) -> bool:
        return self.gemma4 is not None and (layer + 1) % self.gemma4.window_period != 0


# From the configurations that the models were published with.
