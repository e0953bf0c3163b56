"""Reads and checks the hyperparameters of a decoder from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import FormatError
from ..formats.metadata import Metadata
from ..layer_config import LayerConfig, own_layers
from ..model_config import NgramConfig
from ..option_fields import MAX_CONTEXT
from ..rope_config import RopeConfig
from .experts import MAX_WIDTH, ExpertRule, FeedForwardSizes, read_feed_forward
from .hybrids import HybridRule, scan_sizes, ssd_sizes, wkv_sizes
from .indexer import index_sizes, with_block_indexers, with_head_indexers, with_indexers
from .keys import ArchitectureKeys
from .latent import LatentLayout, LatentRule, latent_sizes, read_latent
from .layer_keys import (
    read_head_dims,
    read_layers,
    read_rotary_dim,
    read_sliding_head_dim,
    share_kv,
    with_limits,
)
from .mixed_streams import ngram_sizes, read_ngrams, read_streams, with_ngrams
from .passes import layers_of_passes, read_cycles, read_loops
from .rope import (
    BASE_RANGE,
    NO_SCALING,
    PLAIN_ROPE,
    RopeRule,
    RopeScaling,
    changed_scaling,
    check_sections,
    read_rope_base,
    read_rope_layers,
    read_rope_scaling,
    read_temperature,
)
from .streams import N_STREAMS, StreamRule, with_cutoffs
from .windows import SlidingWindows, read_windows

TOKENS_KEY = "tokenizer.ggml.tokens"
TOKEN_TYPES_KEY = "tokenizer.ggml.token_type_count"

DRAFTING_KEY = "nextn_predict_layers"
CAUSAL_KEY = "attention.causal"
TOKEN_INPUT_KEY = "embedding_length_per_layer_input"
# Tokens of each part that the table of inputs per token is loaded in.
TOKEN_INPUT_ROWS = 16384

MAX_LAYERS = 512
MAX_VOCAB = 2**24
MAX_TOKEN_TYPES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Shape of a decoder and of its layers, and what its RoPE frequencies are made of.

    ``sliding_rope_base`` and ``sliding_rope_scaling`` are those of layers with a sliding window.
    ``n_drafting_layers`` lie behind the others in the file and guess tokens ahead. ``n_streams``,
    ``stream_rank``, ``ngrams``, ``passes``,
    ``norms_passes``, ``has_two_states``, ``hidden_dim``, ``features_dim`` and ``n_guessed``: see
    ``DecoderConfig``; ``layers`` has those of all passes.
    """

    layers: tuple[LayerConfig, ...]
    model_dim: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    feed_forward: FeedForwardSizes
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling
    sliding_rope_base: float
    sliding_rope_scaling: RopeScaling
    sliding_rotary_dim: int
    original_context: int
    temperature_scale: float
    temperature_period: int
    token_input_dim: int
    n_drafting_layers: int
    latent: LatentLayout | None = None
    laurel_rank: int = 0
    n_streams: int = 0
    stream_rank: int = 0
    ngrams: NgramConfig | None = None
    passes: tuple[int, ...] = ()
    norms_passes: bool = False
    has_two_states: bool = False
    n_token_types: int = 0
    hidden_dim: int = 0
    features_dim: int = 0
    n_guessed: int = 0

    @property
    def own_layers(self) -> tuple[LayerConfig, ...]:
        """Those that have weights of their own, of which a file has as many."""
        return own_layers(self.layers, self.passes)

    @property
    def token_input_rows(self) -> int:
        """See ``DecoderConfig``."""
        return TOKEN_INPUT_ROWS if self.token_input_dim else 0

    def with_rope(self, changes: RopeConfig) -> Hyperparameters:
        """The same with another rotary embedding, but where a window bounds the distances."""
        scaling, context_length = changed_scaling(self.rope_scaling, self.context_length, changes)
        return replace(
            self,
            rope_base=changes.freq_base or self.rope_base,
            rope_scaling=scaling,
            context_length=context_length,
        )

    def sizes(self, layer: LayerConfig) -> Mapping[str, int]:
        """Named sizes that the shapes of a layer's tensors are declared in."""
        head_dim = layer.head_dim or self.head_dim
        value_dim = layer.head_dim or self.value_dim
        return {
            "one": 1,
            "n_heads": layer.n_heads,
            "n_kv_heads": layer.n_kv_heads,
            "token_input_dim": self.token_input_dim,
            "token_inputs_dim": self.token_input_dim * len(self.layers),
            "token_input_rows": self.token_input_rows,
            "n_streams": N_STREAMS,
            "n_other_streams": N_STREAMS - 1,
            "n_stream_pairs": N_STREAMS**2,
            "laurel_rank": self.laurel_rank,
            "n_mixed_streams": self.n_streams,
            "streams_dim": self.n_streams * self.model_dim,
            "stream_rank": self.stream_rank,
            **ngram_sizes(self.ngrams),
            "model_dim": self.model_dim,
            "hidden_dim": self.hidden_dim or self.model_dim,
            "hidden_pair_dim": 2 * (self.hidden_dim or self.model_dim),
            "features_dim": self.features_dim,
            "n_guessed": self.n_guessed,
            "ffn_dim": layer.ffn_dim,
            "n_positions": self.context_length,
            "n_token_types": self.n_token_types,
            "n_experts": self.feed_forward.n_experts,
            "shared_ffn_dim": self.feed_forward.shared_ffn_dim,
            "adjugate_ffn_dim": self.feed_forward.adjugate_dim,
            "n_adjugates": self.feed_forward.n_experts // self.feed_forward.n_adjugate_sharers,
            "vocab_size": self.vocab_size,
            "head_dim": head_dim,
            "q_dim": layer.n_heads * head_dim,
            "kv_dim": layer.n_kv_heads * head_dim,
            "v_dim": layer.n_kv_heads * value_dim,
            "out_dim": layer.n_heads * value_dim,
            "n_conv_taps": layer.n_conv_taps,
            "conv_in_dim": 3 * self.model_dim,
            "delta_conv_dim": layer.delta_head_dim
            * (2 * layer.n_delta_key_heads + layer.n_delta_value_heads),
            "delta_value_dim": layer.delta_head_dim * layer.n_delta_value_heads,
            "delta_head_dim": layer.delta_head_dim,
            "n_delta_heads": layer.n_delta_value_heads,
            "n_delta_key_heads": layer.n_delta_key_heads,
            "n_delta_gates": 2 * layer.n_delta_value_heads,
            **ssd_sizes(layer),
            **scan_sizes(layer),
            **wkv_sizes(layer),
            **index_sizes(layer),
            "gated_q_dim": 2 * layer.n_heads * head_dim,
            "qk_dim": (layer.n_heads + layer.n_kv_heads) * head_dim,
            "qkv_dim": (layer.n_heads + layer.n_kv_heads) * head_dim + layer.n_kv_heads * value_dim,
            "gate_up_dim": 2 * layer.ffn_dim,
            "shared_gate_up_dim": 2 * self.feed_forward.shared_ffn_dim,
            **latent_sizes(
                layer.latent or (self.latent.heads if self.latent else None), layer.n_heads
            ),
        }


def read_hyperparameters(
    metadata: Metadata,
    architecture: str,
    windows: SlidingWindows | None = None,
    *,
    experts: ExpertRule | None = None,
    rope: RopeRule = PLAIN_ROPE,
    shares_kv: bool = False,
    has_token_inputs: bool = False,
    streams: StreamRule | None = None,
    mixes_streams: bool = False,
    scores_blocks: bool = False,
    chooses_by_head: bool = False,
    hybrid: HybridRule | None = None,
    has_drafting_layers: bool = False,
    latent: LatentRule | None = None,
    has_layer_norm: bool = False,
    has_joint_width: bool = False,
    has_loops: bool = False,
    has_two_stacks: bool = False,
    is_causal: bool = True,
    has_token_types: bool = False,
    has_other_values: bool = False,
) -> Hyperparameters:
    """Reads ``<architecture>.*`` keys. Raises ``FormatError`` that names the key and its range."""
    n_layers = metadata.get_int(f"{architecture}.block_count", minimum=1, maximum=MAX_LAYERS)
    passes: tuple[int, ...] = ()
    norms_passes = False
    if has_two_stacks:
        passes, n_layers = read_cycles(metadata, architecture, n_layers)
    n_drafting = 0
    if has_drafting_layers:
        key = f"{architecture}.{DRAFTING_KEY}"
        n_drafting = metadata.get_int(key, minimum=0, maximum=n_layers - 1, default=0)
    keys = ArchitectureKeys(metadata, architecture, n_layers - n_drafting, n_drafting)
    _check_causality(keys, is_causal=is_causal)
    check_sections(keys, rope)
    has_one_branch = hybrid is not None and (hybrid.has_one_branch or not hybrid.has_attention)
    feed_forward = read_feed_forward(keys, experts, may_be_missing=has_one_branch)
    if has_joint_width:
        feed_forward = feed_forward.halved()
    widths = read_windows(keys, windows)
    has_rope = read_rope_layers(keys, rope, widths)
    layers = read_layers(keys, feed_forward, widths, has_rope, hybrid)
    if windows is not None and windows.is_chunked:
        layers = tuple(replace(layer, is_chunked=layer.window > 0) for layer in layers)
    if feed_forward.is_dense:
        layers = tuple(
            replace(layer, is_dense=is_dense)
            for layer, is_dense in zip(layers, feed_forward.is_dense, strict=True)
        )
    if rope.has_dense:
        layers = tuple(
            replace(layer, has_rope=layer.has_rope or layer.is_dense) for layer in layers
        )
    layers = with_limits(layers, feed_forward)
    model_dim = keys.integer("embedding_length", maximum=MAX_WIDTH)
    n_heads = next((layer.n_heads for layer in layers if layer.n_heads), 0)
    layout = read_latent(keys, latent, model_dim, n_heads) if latent else None
    if layout is not None:
        head_dim = value_dim = layout.heads.row_dim
        layers = tuple(replace(layer, n_kv_heads=min(layer.n_heads, 1)) for layer in layers)
        if sliding := layout.sliding:
            layers = tuple(
                replace(
                    layer,
                    latent=sliding,
                    head_dim=sliding.row_dim,
                    attention_scale=sliding.head_dim**-0.5,
                )
                if layer.window
                else layer
                for layer in layers
            )
        if layout.index is not None:
            layers = with_indexers(keys, layout.index, layout.heads, layers)
    else:
        head_dim = value_dim = 0
        if n_heads:
            head_dim, value_dim = read_head_dims(
                keys, model_dim, n_heads, may_differ=has_other_values
            )
    rotary_dim = read_rotary_dim(keys, "rope.dimension_count", head_dim) if head_dim else 0
    sliding_rotary_dim = rotary_dim
    if windows is not None and windows.has_own_heads:
        sliding_head_dim = read_sliding_head_dim(keys)
        sliding_rotary_dim = read_rotary_dim(keys, "rope.dimension_count_swa", sliding_head_dim)
        layers = tuple(
            replace(layer, head_dim=sliding_head_dim if layer.window else head_dim)
            for layer in layers
        )
    if windows is not None and windows.has_own_rotary_dim:
        sliding_rotary_dim = read_rotary_dim(
            keys, "rope.dimension_count_swa", head_dim, default=rotary_dim
        )
    if windows is not None and windows.halves_full_rotary:
        if rotary_dim % 4:
            raise FormatError(
                f"{keys.quoted('rope.dimension_count')} is {rotary_dim}, half of which is rotated "
                "in layers without a window, and must be even"
            )
        rotary_dim //= 2
    if shares_kv:
        # Of Gemma 3n all files say: without the key a wrong answer would look like one.
        layers = share_kv(keys, layers, default=None if streams is not None else 0)
    if streams is not None:
        layers = with_cutoffs(keys, streams, layers)
    if scores_blocks:
        layers = with_block_indexers(keys, rotary_dim, layers)
    if chooses_by_head:
        layers = with_head_indexers(keys, rotary_dim, layers)
    vocab_size = _read_vocab_size(keys)
    n_streams, stream_rank = read_streams(keys) if mixes_streams else (0, 0)
    ngrams = read_ngrams(keys, layers, model_dim, vocab_size) if mixes_streams else None
    layers = with_ngrams(layers, ngrams, n_streams * model_dim)
    context_length = keys.integer("context_length", maximum=MAX_CONTEXT)
    if has_loops:
        passes, norms_passes = read_loops(keys, MAX_LAYERS)
    rope_base = read_rope_base(keys, rope, head_dim)
    scaling = read_rope_scaling(keys, context_length, rope)
    temperature_scale, temperature_period = read_temperature(keys, rope, scaling.original_context)
    return Hyperparameters(
        layers=layers_of_passes(layers, passes),
        passes=passes,
        norms_passes=norms_passes,
        has_two_states=has_two_stacks,
        model_dim=model_dim,
        head_dim=head_dim,
        value_dim=value_dim,
        rotary_dim=rotary_dim,
        feed_forward=feed_forward,
        vocab_size=vocab_size,
        context_length=context_length,
        norm_eps=_read_norm_eps(keys, has_one_branch, has_layer_norm),
        rope_base=rope_base,
        rope_scaling=scaling,
        sliding_rope_base=_read_sliding_rope_base(keys, windows) or rope_base,
        sliding_rope_scaling=NO_SCALING if windows and windows.has_plain_rope else scaling,
        sliding_rotary_dim=sliding_rotary_dim,
        original_context=scaling.original_context,
        temperature_scale=temperature_scale,
        temperature_period=temperature_period,
        token_input_dim=keys.integer(TOKEN_INPUT_KEY, minimum=0, maximum=MAX_WIDTH, default=0)
        if has_token_inputs
        else 0,
        n_drafting_layers=n_drafting,
        latent=layout,
        laurel_rank=streams.laurel_rank if streams is not None else 0,
        n_token_types=metadata.get_int(TOKEN_TYPES_KEY, minimum=1, maximum=MAX_TOKEN_TYPES)
        if has_token_types
        else 0,
        n_streams=n_streams,
        stream_rank=stream_rank,
        ngrams=ngrams,
    )


def _check_causality(keys: ArchitectureKeys, *, is_causal: bool) -> None:
    says_causal = keys.metadata.get_bool(keys.full(CAUSAL_KEY), default=is_causal)
    if is_causal and not says_causal:
        raise FormatError(
            f"{keys.quoted(CAUSAL_KEY)} is false: tokens of this model read those behind them too, "
            "which is not supported for this architecture; for vectors of texts use such as "
            "EmbeddingGemma, or a causal model such as Qwen3-Embedding"
        )
    if says_causal and not is_causal:
        raise FormatError(
            f"{keys.quoted(CAUSAL_KEY)} is true, but tokens of models of this architecture read "
            "those behind them too; the file was converted wrongly"
        )


def _read_sliding_rope_base(keys: ArchitectureKeys, windows: SlidingWindows | None) -> float | None:
    """Base of the rotary embedding in layers with a window; None for that of the model."""
    if windows is None or not keys.has("rope.freq_base_swa"):
        return windows.rope_base if windows else None
    return keys.number("rope.freq_base_swa", **BASE_RANGE)


def _read_norm_eps(keys: ArchitectureKeys, may_be_other: bool, has_layer_norm: bool) -> float:
    """Of RMS norms, of which some converters only write the key of other norms, or of LayerNorm."""
    key = "attention.layer_norm_rms_epsilon"
    if has_layer_norm or (may_be_other and not keys.has(key)):
        key = "attention.layer_norm_epsilon"
    return keys.number(key, above=0.0, below=1.0)


def _read_vocab_size(keys: ArchitectureKeys) -> int:
    """The number of tokens; ``<architecture>.vocab_size`` is for files without a tokenizer."""
    if TOKENS_KEY not in keys.metadata:
        return keys.integer("vocab_size", maximum=MAX_VOCAB)
    n_tokens = len(keys.metadata.get_strings(TOKENS_KEY))
    if not n_tokens:
        raise FormatError(f"metadata key {TOKENS_KEY!r} is empty; the model has no vocabulary")
    return n_tokens
