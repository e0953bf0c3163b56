"""What a model is, as read from its file: sizes and constants, in frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Of a short convolution, as the core has it.
MAX_CONV_TAPS = 16


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
class Xielu:
    """``positive x^2 + beta x`` where x > 0.

    Where it is not, ``negative (exp(min(x, eps)) - 1 - x) + beta x``.
    """

    positive: float = 0.0
    negative: float = 0.0
    beta: float = 0.0
    eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What a layer has of its own.

    ``window`` counts the positions that a query sees, its own included, up to it, and as many
    behind it where the model is not causal; 0: all. If it
    ``is_chunked``, those are what lies behind the last multiple of it. ``ffn_dim`` is the
    width of the feed-forward network, or of each expert. ``has_rope`` is false for layers without
    positions. A ``head_dim`` of 0 is that of the model. Keys and values are the layer's own, or
    those of ``kv_distance`` layers before it. A layer whose ``mixer`` is "short_conv" has no heads:
    a convolution of ``n_conv_taps`` tokens takes the place of attention. One whose mixer is
    "delta_net" has a convolution and ``n_delta_value_heads`` heads of ``delta_head_dim`` values,
    several of which may share the queries and keys of one of ``n_delta_key_heads``: neighbours, if
    they are grouped, else those that are so many heads apart; if it ``has_row_decays``, every row
    of a state decays by itself, with a ``delta_log_floor`` below 0 to the exponential of that at
    the least, by what is made of the layer's input, or of ``delta_gate_rank`` numbers that are, as
    its gates then are too. "mamba2" has a convolution and ``n_ssd_heads`` heads of
    ``ssd_head_dim`` values, each with a state of ``ssd_state_dim`` rows; what writes to it and
    reads it is that of one of ``n_ssd_groups``; with an ``ssd_step_rank`` that is not 0 these, and
    rates by way of so many numbers, are made of its channels, as in "mamba1", not of the layer's
    input. "attention_mamba2" has attention beside it.
    "mamba1" has a convolution and ``n_scan_channels`` channels, each with ``scan_state_dim``
    states, whose steps are made of ``scan_step_rank`` numbers, with the ``scan_norms`` "weighted",
    "plain" or "none". "rwkv7" has ``n_wkv_heads`` heads of ``wkv_head_dim`` numbers, with decays,
    rates, shares of the first layer's values and gates made of vectors of ``wkv_decay_rank``,
    ``wkv_rate_rank``, ``wkv_value_rank``, which is 0 in the first layer, and ``wkv_gate_rank``
    numbers; what goes into it, and with ``has_shifted_network`` into the network behind it, has
    that of the token before in it.
    "rwkv6" has the like, with decays made of ``wkv_decay_rank`` numbers, and the shares of the
    token before of five times ``wkv_shift_rank``; it is linear attention if it does not
    ``wkv_norms_heads``, and its keys and values may be those of ``n_wkv_kv_heads`` alone. The
    residual stream is multiplied by ``output_scale`` behind the layer. A layer whose mixer is
    "none" has a feed-forward network only, and one with an ``ffn_dim`` of 0 has none.
    In a mixture of experts a layer ``is_dense`` has one feed-forward
    network. ``xielu`` is of the activation of that name. Of a gate what lies ``gate_cutoff``
    standard deviations above its mean goes into the activation; None: all of it. What
    goes into it is at most the ``gate_limit``, and what it multiplies between the ``up_limit`` and
    its negative, where these are not 0, and in the shared expert the others of the kind. With an
    ``index_top_k`` a query reads so many tokens: those that score best by an indexer of
    ``index_heads`` queries and one key of ``index_key_dim`` numbers per token, or, without any,
    what the layer before has read; with ``index_block_tokens`` blocks of as many tokens have one
    score, and the tokens behind the last block are read too; with ``index_per_head`` every KV head
    reads blocks of its own, the last ``index_local_blocks`` of them always. What comes out of a
    delta net is multiplied by sigmoids if it ``has_delta_sigmoid``. A layer that looks n-grams up
    keeps ``history_rows`` rows of ``history_dim`` numbers of the tokens before. A layer that
    ``has_large_keys``, by their biases, takes no products in 8 bits.
    One without ``has_mixer_norm`` has no norm of its mixer's input where others have. Keys and
    values that ``are_lent`` are those of layer ``lender`` of another model, for which this drafts.
    ``has_sinks`` adds a logit without a value to every head's softmax. One whose ``latent`` heads
    are not those of the model has these, and an ``attention_scale`` of its own, 0 for the model's.
    """

    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    window: int = 0
    is_chunked: bool = False
    has_rope: bool = True
    head_dim: int = 0
    kv_distance: int = 0
    mixer: str = "attention"
    n_conv_taps: int = 0
    n_delta_key_heads: int = 0
    n_delta_value_heads: int = 0
    delta_head_dim: int = 0
    has_grouped_delta_heads: bool = False
    has_row_decays: bool = False
    delta_log_floor: float = 0.0
    delta_gate_rank: int = 0
    has_delta_sigmoid: bool = False
    n_ssd_heads: int = 0
    ssd_head_dim: int = 0
    n_ssd_groups: int = 0
    ssd_state_dim: int = 0
    ssd_step_rank: int = 0
    n_scan_channels: int = 0
    scan_state_dim: int = 0
    scan_step_rank: int = 0
    scan_norms: str = "none"
    n_wkv_heads: int = 0
    n_wkv_kv_heads: int = 0
    wkv_head_dim: int = 0
    wkv_decay_rank: int = 0
    wkv_rate_rank: int = 0
    wkv_value_rank: int = 0
    wkv_gate_rank: int = 0
    wkv_shift_rank: int = 0
    wkv_norms_heads: bool = True
    has_shifted_network: bool = False
    output_scale: float = 1.0
    is_dense: bool = False
    xielu: Xielu = Xielu()
    gate_cutoff: float | None = None
    gate_limit: float = 0.0
    up_limit: float = 0.0
    shared_gate_limit: float = 0.0
    shared_up_limit: float = 0.0
    index_heads: int = 0
    index_key_dim: int = 0
    index_top_k: int = 0
    index_block_tokens: int = 0
    index_per_head: bool = False
    index_local_blocks: int = 0
    history_rows: int = 0
    history_dim: int = 0
    has_large_keys: bool = False
    has_mixer_norm: bool = True
    are_lent: bool = False
    lender: int = 0
    has_sinks: bool = False
    latent: LatentHeads | None = None
    attention_scale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Multi-head latent attention: what the heads of every layer are made of.

    Keys and values of all heads are products of one cached row per token: a vector of ``rank``
    numbers, and ``rope_dim`` that are rotated and that all heads share. A head's queries have
    ``nope_dim`` numbers and ``rope_dim`` rotated ones, its values ``value_dim``. Queries are made
    of a vector of ``q_rank`` numbers, or of the layer's input if that is 0.
    """

    rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def row_dim(self) -> int:
        """Numbers of a cached row."""
        return self.rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Numbers of a query before it is brought to the space of the cached rows."""
        return self.nope_dim + self.rope_dim


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


def own_layers(layers: tuple[LayerConfig, ...], passes: tuple[int, ...]) -> tuple[LayerConfig, ...]:
    """Of the layers of all passes (see ``DecoderConfig``) those of every stack, once."""
    if not passes:
        return layers
    n = len(layers) // len(passes)
    firsts = [n * passes.index(stack) for stack in range(max(passes) + 1)]
    return tuple(layer for first in firsts for layer in layers[first : first + n])


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
