"""Sizes and settings of published models."""

from __future__ import annotations

from collections.abc import Mapping
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
SHAPES: Mapping[str, Shape] = {
    "qwen2.5-0.5b": Shape(
        architecture="qwen2",
        n_layers=24,
        model_dim=896,
        n_heads=14,
        n_kv_heads=2,
        head_dim=64,
        ffn_dim=4864,
        context_length=32768,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qkv_biases=True,
    ),
    "llama-3.2-1b": Shape(
        architecture="llama",
        n_layers=16,
        model_dim=2048,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        context_length=131072,
        rope_base=5e5,
        norm_epsilon=1e-5,
        tied=True,
        rope_factor=32.0,
    ),
    "qwen3-1.7b": Shape(
        architecture="qwen3",
        n_layers=28,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=6144,
        context_length=40960,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
    ),
    "smollm3-3b": Shape(
        architecture="smollm3",
        n_layers=36,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=11008,
        context_length=65536,
        rope_base=5e6,
        norm_epsilon=1e-6,
        tied=True,
    ),
    "gemma-3n-e2b": Shape(
        architecture="gemma3n",
        n_layers=30,
        model_dim=2048,
        n_heads=8,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=8192,
        context_length=32768,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        gemma4=Gemma4(
            window=512,
            window_period=5,
            head_dim_sliding=256,
            n_shared_kv=10,
            token_input_dim=256,
            has_streams=True,
        ),
    ),
    "gemma-4-e2b": Shape(
        architecture="gemma4",
        n_layers=35,
        model_dim=1536,
        n_heads=8,
        n_kv_heads=1,
        head_dim=512,
        ffn_dim=6144,
        context_length=131072,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        gemma4=Gemma4(
            window=512, window_period=5, head_dim_sliding=256, n_shared_kv=20, token_input_dim=256
        ),
    ),
    "lfm2-1.2b": Shape(
        architecture="lfm2",
        n_layers=16,
        model_dim=2048,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        context_length=128000,
        rope_base=1e6,
        norm_epsilon=1e-5,
        tied=True,
        qk_norms=True,
        attention_layers=(2, 5, 8, 10, 12, 14),
        n_conv_taps=3,
    ),
    "qwen3.5-2b": Shape(
        architecture="qwen35",
        n_layers=24,
        model_dim=2048,
        n_heads=8,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=6144,
        context_length=262144,
        rope_base=1e7,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        n_conv_taps=4,
        delta_net=DeltaNet(period=4, n_key_heads=16, n_value_heads=16, head_dim=128),
        rotary_dim=64,
    ),
    # 48 layers of about 3B weights per token, as it is published; all other sizes are assumed, and
    # the table of n-grams is small.
    "qwen3.8-flash-next": Shape(
        architecture="qwen4exp",
        n_layers=48,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=512,
        context_length=262144,
        rope_base=1e7,
        norm_epsilon=1e-6,
        tied=False,
        qk_norms=True,
        experts=Experts(n_experts=128, n_used=10, has_shared=True),
        n_conv_taps=4,
        delta_net=DeltaNet(period=4, n_key_heads=16, n_value_heads=32, head_dim=128),
        rotary_dim=64,
        mixed_streams=MixedStreams(
            n_streams=4,
            rank=128,
            index_heads=4,
            index_dim=128,
            index_top_k=2048,
            block_tokens=4,
            ngram_tokens=3,
            n_ngram_heads=16,
            ngram_taps=4,
            ngram_rows=50_021,
        ),
    ),
    "granite-4.0-h-1b": Shape(
        architecture="granitehybrid",
        n_layers=40,
        model_dim=1536,
        n_heads=12,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=4096,
        context_length=131072,
        rope_base=1e4,
        norm_epsilon=1e-5,
        tied=True,
        attention_layers=(5, 15, 25, 35),
        n_conv_taps=4,
        mamba2=Mamba2(n_heads=48, head_dim=64, n_groups=1, state_dim=128),
    ),
    # Of the two layers that attend the places are assumed.
    "jamba-reasoning-3b": Shape(
        architecture="jamba",
        n_layers=28,
        model_dim=2560,
        n_heads=20,
        n_kv_heads=1,
        head_dim=128,
        ffn_dim=8192,
        context_length=262144,
        rope_base=1e4,
        norm_epsilon=1e-6,
        tied=True,
        attention_layers=(7, 21),
        n_conv_taps=4,
        mamba1=Mamba1(n_channels=5120, state_dim=16, step_rank=160),
    ),
    # Of decays and shifts the ranks are those that llama.cpp's converter assumes.
    "qrwkv6-7b": Shape(
        architecture="rwkv6qwen2",
        n_layers=28,
        model_dim=3584,
        n_heads=0,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=18944,
        context_length=2**20,
        rope_base=1e4,
        norm_epsilon=1e-6,
        tied=False,
        linear=LinearAttention(n_kv_heads=4, head_dim=128, shift_rank=32, decay_rank=64),
    ),
    "arwkv-7b": Shape(
        architecture="arwkv7",
        n_layers=28,
        model_dim=3584,
        n_heads=0,
        n_kv_heads=0,
        head_dim=64,
        ffn_dim=18944,
        context_length=2**20,
        rope_base=1e4,
        norm_epsilon=1e-6,
        tied=False,
        time_mix=TimeMix(head_dim=64, decay_rank=64, rate_rank=64, value_rank=32),
    ),
    "llama-3.1-8b": Shape(
        architecture="llama",
        n_layers=32,
        model_dim=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=14336,
        context_length=131072,
        rope_base=5e5,
        norm_epsilon=1e-5,
        tied=False,
        rope_factor=8.0,
    ),
    "olmoe-1b-7b": Shape(
        architecture="olmoe",
        n_layers=16,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        ffn_dim=1024,
        context_length=4096,
        rope_base=1e4,
        norm_epsilon=1e-5,
        tied=False,
        qk_norms="projection",
        experts=Experts(n_experts=64, n_used=8),
    ),
    "qwen3-30b-a3b": Shape(
        architecture="qwen3moe",
        n_layers=48,
        model_dim=2048,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=768,
        context_length=40960,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=False,
        qk_norms=True,
        experts=Experts(n_experts=128, n_used=8),
    ),
    "gpt-oss-20b": Shape(
        architecture="gpt-oss",
        n_layers=24,
        model_dim=2880,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=2880,
        context_length=131072,
        rope_base=1.5e5,
        trained_context=4096,
        norm_epsilon=1e-5,
        tied=False,
        qkv_biases=True,
        experts=Experts(n_experts=32, n_used=4, has_biases=True),
        window=128,
    ),
    "embeddinggemma-300m": Shape(
        architecture="gemma-embedding",
        n_layers=24,
        model_dim=768,
        n_heads=3,
        n_kv_heads=1,
        head_dim=256,
        ffn_dim=1152,
        context_length=2048,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms="head",
        encoder=Encoder(window=512, window_period=6),
    ),
    "nomic-embed-text-1.5": Shape(
        architecture="nomic-bert",
        n_layers=12,
        model_dim=768,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        ffn_dim=3072,
        context_length=8192,
        rope_base=1000.0,
        norm_epsilon=1e-12,
        tied=True,
        encoder=Encoder(),
    ),
    "bge-base": Shape(
        architecture="bert",
        n_layers=12,
        model_dim=768,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        ffn_dim=3072,
        context_length=512,
        rope_base=10000.0,
        norm_epsilon=1e-12,
        tied=True,
        encoder=Encoder(),
    ),
}
