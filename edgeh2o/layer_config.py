"""What a layer of a decoder is, as read from a model file."""

from __future__ import annotations

from dataclasses import dataclass

# Of a short convolution, as the core has it.
MAX_CONV_TAPS = 16


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


def own_layers(layers: tuple[LayerConfig, ...], passes: tuple[int, ...]) -> tuple[LayerConfig, ...]:
    """Of the layers of all passes (see ``DecoderConfig``) those of every stack, once."""
    if not passes:
        return layers
    n = len(layers) // len(passes)
    firsts = [n * passes.index(stack) for stack in range(max(passes) + 1)]
    return tuple(layer for first in firsts for layer in layers[first : first + n])
