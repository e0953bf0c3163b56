"""What a model is, as read from its file: sizes and constants, in frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .layer_config import LatentHeads, LayerConfig, own_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What sessions, attention and statistics need to know of a model of any format.

    ``n_heads`` and ``n_kv_heads`` are the largest of a layer. ``context_length`` is in positions.
    An ``attention_soft_cap`` of 0 is none. ``has_key_bias`` tells of biases of the key projection.
    ``fingerprint`` names the weights, whatever their quantisation. ``has_shared_sets`` says that
    where the model computes query heads of a KV head read the same, and generated tokens read
    everything. Where it is not ``is_causal`` tokens read those behind them too: texts are read for
    their vectors, each in one call, and none is written.
    """

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    attention_scale: float
    attention_soft_cap: float = 0.0
    has_key_bias: bool = False
    fingerprint: str = ""
    has_shared_sets: bool = False
    is_causal: bool = True

    @property
    def layer_heads(self) -> Sequence[tuple[int, int]]:
        """Query heads and KV heads of every layer."""
        return [(self.n_heads, self.n_kv_heads)] * self.n_layers

    @property
    def n_slots(self) -> int:
        """KV heads of all layers."""
        return sum(n_kv_heads for _, n_kv_heads in self.layer_heads)

    @property
    def has_rope(self) -> bool:
        """Whether a layer that attends rotates its queries and keys."""
        return self.n_slots > 0

    @property
    def splits_groups(self) -> bool:
        """Whether query heads that share a KV head may have memory sets of their own."""
        return self._may_split_groups

    @property
    def decodes_by_rule(self) -> bool:
        """Whether generated tokens may read a part of what is cached."""
        return not self.has_shared_sets

    @property
    def _may_split_groups(self) -> bool:
        are_equal = len(set(self.layer_heads)) == 1
        return are_equal and not self.has_shared_sets and self.n_heads > self.n_kv_heads

    @property
    def has_like_layers(self) -> bool:
        """Whether layers attend alike: to keys and values of their own, in heads of one size."""
        return True

    @property
    def most_positions(self) -> int:
        """Positions that the model has rows of a table for; 0: it goes on beyond any."""
        return 0

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have a state in the place of keys and values, or beside them."""
        return False

    @property
    def index_top_k(self) -> int:
        """Tokens that an indexer of the model's own lets a query read; 0: it has none."""
        return 0

    @property
    def has_distance_bias(self) -> bool:
        """Whether logits of attention lose something by the distance of query and key (ALiBi)."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Embeddings of the last tokens together, which one layer adds to the residual streams.

    Of every number of tokens from 2 to ``n_tokens``, ``n_heads_per_size`` rows of ``row_dim``
    numbers of a table of ``n_rows``, which stays in the model's file. Row h of token t at p is
    ``offsets[h] + (t[p] * factors[0] ^ t[p - 1] * factors[1] ^ ...) % sizes[h]``, modulo 2**64;
    from an ``end_token`` back, and before the first token, all count as that one. What is made of
    them is convolved over ``n_taps`` tokens, ``n_tokens`` apart.
    """

    layer: int
    n_tokens: int
    n_heads_per_size: int
    row_dim: int
    n_rows: int
    n_taps: int
    end_token: int
    factors: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingConfig:
    """How a model says whether a document answers a query: by its first label.

    That has a probability (``has_softmax``) or a logit. ``template`` is the prompt of both, with
    ``{query}`` and ``{document}``, "" where the file has none. The hidden row that ``pooling``
    gives goes through the ``tensors`` of the file, in their order, with an ``activation`` behind
    the first matrix if that is not "".
    """

    labels: tuple[str, ...]
    template: str = ""
    has_softmax: bool = True
    activation: Literal["", "tanh", "gelu_tanh"] = ""
    pooling: Literal["last", "cls", "mean"] = "last"
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shape and constants of a decoder that the core runs, as read from a model file.

    ``rope_inv_freq`` has ``rotary_dim / 2`` entries in radians per position, with every scaling
    of the file already applied. Layers with a sliding window take ``sliding_rope_inv_freq``
    instead unless it is empty, and a session for more than ``long_rope_after`` positions
    ``long_rope_inv_freq``.

    Norms are RMS norms, or LayerNorm (``centres_norms``), which may have biases where RMS norms
    have them only with ``has_norm_biases``, and no weights without ``has_norm_weights``;
    ``has_output_bias`` is of the logits. ``norm_placement`` says what of a residual branch is
    normalised: "pre" its input, "post" its output, with ``post_norm_eps`` if that is not 0, "both",
    or "sum", the residual stream once it was added, which needs no norm behind the last layer then
    (``has_output_norm``); embeddings are with ``norms_embeddings``, without weights, or with
    ``has_embedding_norm``, as inputs are, and a vector is added to them with ``has_token_type``;
    where it ``is_parallel``, the network has the input of attention, normed alike or by a norm of
    its own (``has_parallel_norm``). Of "sum", with ``has_second_norm`` the layer's input is added
    once more behind the norm of attention, and the stream normed again.
    Logits of attention lose a slope of their head times the distance of query and key (ALiBi) if
    ``max_alibi_bias`` is not 0: the slope of the last of n heads, if n is a power of two, is 2 to
    the power of minus that.
    Queries, keys and values are clamped to ``qkv_limit`` if that is not 0, and have one vector of
    biases with ``has_joint_bias``. With ``has_sub_norms`` what attention gives, and what the
    activation of a network, is normed before the next product. With ``has_head_gains`` norms of
    queries and keys have no weights, heads of queries and the outputs of both branches have a
    factor each, and a multiple of the embedding is added behind every layer. ``qk_norm`` normalises
    queries and keys: of each "head", of each by weights of its own ("own_head"), of the whole
    "projection", which "layer" does by LayerNorm, or "none"; before the rotary embedding or after
    it; with ``norms_rotated`` heads
    are normed, without weights, in layers that have one.
    With experts, every token goes through ``n_experts_used`` of ``n_experts``
    feed-forward networks, whose shares may add up to 1 (``normalises_experts``) and are multiplied
    by ``expert_scale``, and through a shared one of width ``shared_ffn_dim``, 0 for none, weighted
    by a gate if it has one; the sum of all is multiplied by ``experts_scale``. With
    ``has_expert_norms`` the router, the experts and the shared one have norms of their own; a
    router that ``routes_by_input`` reads what the layer gets, before its mixer, without a norm;
    with ``scales_expert_inputs`` shares are factors of the experts' inputs, not of their outputs.
    ``n_adjugate_sharers`` neighbours each share another expert of width ``adjugate_ffn_dim``, 0 for
    none, which a token goes through with the sum of their shares times ``adjugate_scale``.
    The experts of a token are of ``n_expert_groups_used`` of ``n_expert_groups`` groups of
    neighbours. ``expert_gate`` makes shares of a router's logits, "softmax" or "sigmoid"; with
    ``has_expert_bias`` numbers count in the choice of experts alone. A query at position p is
    multiplied by ``1 + temperature_scale * ln(1 + floor((p + temperature_offset) /
    temperature_period))``, in layers without a rotary embedding only if it ``grows_unrotated``; a
    period of 0 is none, and so is a ``logit_soft_cap`` of 0. ``norms_values`` norms heads of values
    without weights. Values of heads have ``value_dim`` numbers, as many as their keys if that is 0,
    and are multiplied by ``value_scale``. A layer's
    input per token, if its width ``token_input_dim`` is not 0, has a table loaded in parts of
    ``token_input_rows`` tokens. What attention gives is multiplied by the ``output_gate``: sigmoids
    of a second half of the query projection ("of_queries") or of a matrix of its own
    ("per_output"), or a number "per_head" of such a matrix, of which ``head_gate`` is the function,
    "sigmoid" or "softplus". With ``latent`` heads there is one KV head, whose rows of ``head_dim``
    numbers are keys and values; ``rotary_dim`` is of their last ones, which are normed by
    themselves with ``has_latent_key_norm``. With ``n_positions``
    positions are as many rows of a table, which are added to embeddings. With ``has_streams`` every
    token has several residual streams (AltUp); a ``laurel_rank`` that is not 0 is that of a branch
    of two matrices beside attention (LAuReL). One that ``reads_hidden`` is a layer that guesses
    tokens ahead: beside a token it reads what the logits of the token before were made of, and it
    has logits of the first ``n_guessed`` tokens, 0 for all, or of as many that its file names. It
    has the token and the row in one product, both "normed" (``hidden_join``) or as they are
    ("plain"), or the row, which is the residual stream then, "apart" from the token; or keys and
    values of rows are "cached", and tokens stand in blocks behind them. Rows have ``hidden_dim``
    numbers, 0 for ``model_dim``; those of the last two are made of ``features_dim`` numbers of the
    other model, which are normed with ``norms_features``, and with ``residual_is_normed`` the
    residual stream is the normed row. Low-rank updates of a matrix (LoRA) have a rank of
    ``update_rank`` together at the most, and count by the ``adapter_scales`` of their adapters
    where a session says nothing else; or the tokens of a text say which one counts in which row:
    ``adapter_tokens`` has, for every adapter, the token from which on it does, and what this is
    read as, and ``adapter_gain`` by how much such a token outweighs others. ``passes`` are the
    stacks of layers in the
    order that they are gone through: passes in that one stack recurs have its weights, but keys and
    values of their own, and ``layers`` has those of all passes; empty: one stack, once. With
    ``norms_passes`` the residual stream is normed between them, as logits are made of it. With
    ``has_two_states`` each of two stacks has a state: the sum of both goes into a pass, and what
    comes out, normed so, is the new state of its stack; the second's first is the embedding.
    With ``n_streams`` every token has as many residual streams, which are mixed before every
    branch, by way of ``stream_rank`` numbers, and of which all get what it gives;
    ``norm_placement`` is "none" then. ``ngrams`` are looked up for them.
    ``pooling`` is what the file says of how vectors of texts are made of hidden rows, by its name
    in llama.cpp, "" for a number without one; ``ranking`` is of models that rank documents.
    ``dense_modules`` are matrices that vectors are multiplied with, by their names in the file.
    """

    layers: tuple[LayerConfig, ...]
    model_dim: int
    rotary_dim: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    n_experts: int = 0
    n_experts_used: int = 0
    normalises_experts: bool = True
    shared_ffn_dim: int = 0
    has_shared_gate: bool = False
    has_expert_norms: bool = False
    routes_by_input: bool = False
    scales_expert_inputs: bool = False
    adjugate_ffn_dim: int = 0
    n_adjugate_sharers: int = 1
    adjugate_scale: float = 1.0
    expert_gate: str = "softmax"
    expert_scale: float = 1.0
    experts_scale: float = 1.0
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    has_expert_bias: bool = False
    rope_attention_factor: float = 1.0
    embedding_scale: float = 1.0
    norms_embeddings: bool = False
    has_embedding_norm: bool = False
    has_token_type: bool = False
    has_output_norm: bool = True
    post_norm_eps: float = 0.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied_embeddings: bool = False
    has_output_bias: bool = False
    centres_norms: bool = False
    has_norm_weights: bool = True
    has_norm_biases: bool = False
    norm_placement: str = "pre"
    has_second_norm: bool = False
    max_alibi_bias: float = 0.0
    is_parallel: bool = False
    has_parallel_norm: bool = False
    qkv_limit: float = 0.0
    has_joint_bias: bool = False
    has_sub_norms: bool = False
    has_head_gains: bool = False
    qk_norm: str = "none"
    qk_norm_after_rope: bool = False
    norms_rotated: bool = False
    temperature_scale: float = 0.0
    temperature_period: int = 0
    temperature_offset: int = 0
    grows_unrotated: bool = False
    value_dim: int = 0
    value_scale: float = 1.0
    norms_values: bool = False
    output_gate: str = "none"
    head_gate: str = "sigmoid"
    token_input_dim: int = 0
    token_input_rows: int = 0
    update_rank: int = 0
    adapter_scales: tuple[float, ...] = ()
    adapter_tokens: tuple[tuple[int, int], ...] = ()
    adapter_gain: float = 0.0
    has_output_scale: bool = False
    has_streams: bool = False
    n_streams: int = 0
    stream_rank: int = 0
    ngrams: NgramConfig | None = None
    laurel_rank: int = 0
    activation: str = "silu"
    logit_soft_cap: float = 0.0
    n_positions: int = 0
    sliding_rope_inv_freq: tuple[float, ...] = ()
    long_rope_inv_freq: tuple[float, ...] = ()
    long_rope_after: int = 0
    latent: LatentHeads | None = None
    has_latent_key_norm: bool = False
    reads_hidden: bool = False
    n_guessed: int = 0
    hidden_join: str = "normed"
    hidden_dim: int = 0
    features_dim: int = 0
    norms_features: bool = False
    residual_is_normed: bool = False
    passes: tuple[int, ...] = ()
    norms_passes: bool = False
    has_two_states: bool = False
    pooling: str = "none"
    ranking: RankingConfig | None = None
    dense_modules: tuple[str, ...] = ()

    @property
    def own_layers(self) -> tuple[LayerConfig, ...]:
        """Those that have weights of their own, of which the file has as many."""
        return own_layers(self.layers, self.passes)

    def own_layer(self, layer: int) -> int:
        """Which of these a layer has the weights of."""
        if not self.passes:
            return layer
        number, place = divmod(layer, len(self.layers) // len(self.passes))
        return self.passes[number] * (len(self.layers) // len(self.passes)) + place

    @property
    def has_like_layers(self) -> bool:
        differ = any(layer.head_dim or layer.kv_distance for layer in self.layers)
        differ |= self.value_dim not in (0, self.head_dim)
        return not (differ or self.has_sinks or self.is_recurrent or self.index_top_k)

    @property
    def has_sinks(self) -> bool:
        """Whether some layer has."""
        return any(layer.has_sinks for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        return any(layer.mixer not in ("attention", "none") for layer in self.layers)

    @property
    def most_positions(self) -> int:
        return self.n_positions

    @property
    def is_gated(self) -> bool:
        """Whether feed-forward networks have a gate: three matrices, and not two."""
        return self.activation not in ("relu_squared", "ungated_gelu", "xielu")

    def head_dim_of(self, layer: LayerConfig) -> int:
        """Numbers of a key of one of its layers."""
        return layer.head_dim or self.head_dim

    def value_dim_of(self, layer: LayerConfig) -> int:
        """Numbers of a cached value of one."""
        if latent := layer.latent or self.latent:
            return latent.rank
        return layer.head_dim or self.value_dim or self.head_dim

    @property
    def index_top_k(self) -> int:
        return max(layer.index_top_k for layer in self.layers)

    @property
    def has_distance_bias(self) -> bool:
        return self.max_alibi_bias > 0.0

    @property
    def layer_heads(self) -> Sequence[tuple[int, int]]:
        return [(layer.n_heads, layer.n_kv_heads) for layer in self.layers]

    @property
    def has_rope(self) -> bool:
        return any(layer.has_rope and layer.n_heads > 0 for layer in self.layers)

    @property
    def splits_groups(self) -> bool:
        return self.latent is None and self._may_split_groups
