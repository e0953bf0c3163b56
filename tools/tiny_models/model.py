"""What a tiny model is: sizes, options, and what follows of them for every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.reference.codebook_quants import CODEBOOK_TYPES
from tests.reference.k_quants import K_TYPES
from tests.tiny_architectures import ENCODERS, FAMILIES
from tests.tiny_family import Family
from tools.tiny_models.tokenizer import vocabulary

PerLayer = int | tuple[int, ...]
LAYER_OPTIONS = ("n_heads", "n_kv_heads", "ffn_dim")

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *K_TYPES, *CODEBOOK_TYPES)
TENSOR_TYPES = FLOAT_TYPES + BLOCK_TYPES
# Of so many layers with a delta net the last attends.
DELTA_NET_PERIOD = 2
GEMMA3N_INPUT_DIM = 256  # the one that llama.cpp runs, whatever a file says
ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to write.

    Attributes:
        tensor_type: type of every matrix, one of TENSOR_TYPES; vectors are F32.
        embedding_type: type of the token embedding and output; None for tensor_type.
        n_heads, n_kv_heads, ffn_dim: of all layers, or a tuple with a number per layer; no KV heads
            for a convolution.
        has_qk_norm: queries and keys are normed, in families that may.
        n_conv_taps: tokens of a convolution.
        n_delta_key_heads, n_delta_value_heads, delta_head_dim: of a delta net.
        n_ssd_heads, ssd_head_dim, n_ssd_groups, ssd_state_dim, has_ssm_norm: of Mamba-2.
        n_scan_channels, scan_state_dim, scan_step_rank: of Mamba-1; None for twice model_dim.
        wkv_head_dim, wkv_decay_rank, wkv_rate_rank, wkv_value_rank, wkv_gate_rank: of RWKV-7.
        wkv_shift_rank, rescale_every: of RWKV-6, which has head_dim and decay_rank too.
        has_wkv_norms: heads of arwkv7 have norms; without a gate_rank it has no gates.
        n_wkv_kv_heads, has_wkv_biases: of rwkv6qwen2; 0 where every head has keys of its own.
        has_scan_norms: it norms what it selects by, of mamba.
        n_dense_layers: first layers without experts, in families that have some.
        n_experts, n_experts_used: of a layer and of a token, in families that have experts. None
            make a dense model of granitehybrid and granite_swa.
        is_mixture: layers have experts, of llama.
        n_adjugate_sharers, adjugate_ffn_dim, adjugate_scale: of experts that share others.
        experts_step: the last of so many layers has experts, of llama4.
        temperature_length: positions after which queries grow, of llama4; None for no key.
        adapter_tokens, adapter_rank, adapter_gain: of adapters, which the first of each pair of
            tokens chooses and the second stands for, of graniteswitch.
        rope_pattern: which layers are rotated, of granite_swa; None for no key.
        shared_ffn_dim: width of the expert that every token goes through; None for no key, which
            means none, or one of ffn_dim where it has a gate or must be there.
        n_expert_groups, n_expert_groups_used: of experts, and of those a token's are of, where the
            file says so.
        n_shared_experts: how many experts wide the shared one is, where the file says so.
        has_softmax_gate: experts without biases are weighted by a softmax, of deepseek2.
        kv_rank, q_rank, nope_dim, rope_dim, value_dim: of latent attention; a q_rank of 0 is none.
            The last is of mimo2 too.
        sliding_kv_rank, sliding_nope_dim, sliding_value_dim: of layers with a window, of dots3note.
        index_heads, index_key_dim, index_top_k: of indexers, which every so many layers
            (indexer_period) have one of.
        index_block_tokens: tokens that have one score, of qwen4exp and minimax-m3; 0: everything is
            read.
        index_local_blocks: the last ones, which are read whatever their score, of the latter.
        n_streams, stream_rank: residual streams that are mixed, of qwen4exp.
        ngram_tokens, ngram_heads, ngram_taps, ngram_layer: of n-grams that it looks up; without
            tokens it does not.
        has_matrices_per_head: its keys and values have matrices per head, of deepseek2.
        rotary_dim: rotated elements per head; None for head_dim.
        rotary_dim_sliding: of layers with a window; None for no key.
        rotates: there is a rotary embedding, of granitehybrid.
        rope_scaling: None, "linear" or "yarn" (a factor in the metadata), "llama3" (a factor per
            frequency in the tensor rope_freqs.weight), or "longrope" (two such tensors).
        original_context: positions of the first training, for "yarn" and "longrope".
        sliding_window: positions that a query sees in layers with a window; None for no key.
        sliding_window_pattern: every so many layers one has full attention; None for no key.
        head_dim_sliding: head size of layers with a window, of gemma4.
        has_values_of_keys: layers with full attention have no matrix of values, of gemma4.
        expert_ffn_dim: width of experts beside every layer's network, of gemma4; 0 for none.
        n_shared_kv: last layers that read the keys and values of others, of gemma4 and gemma3n.
        token_input_dim: width of every layer's input per token, of gemma4 and gemma3n.
        n_cut_layers: first layers whose gates are cut off, of gemma3n; None for ten or all.
        rope_base_sliding: base of the layers with a window; None for no key.
        pooling_type: how vectors of texts are made, as llama.cpp numbers it; None for no key.
        rank_labels: what a matrix has logits of, that ranks documents; () for none.
        rank_tensors: names of others that have a part in it.
        has_unigram: the tokenizer is a unigram model, in the place of WordPiece.
        adds_eos: every text ends with the token that ends one.
        tied: the token embedding is also the output matrix.
        biases: the seven matrices of a layer have biases, and so have norms of mpt.
        has_scales: these matrices have a factor each, of bitnet.
        has_two_norms: attention and the network beside it have one each, of falcon, or there is a
            second norm behind attention, of jina-bert-v2.
        has_table: positions are rows of a table, not a bias by distance, of mpt.
        network: its kind of network there: "joined" gate and up, "apart", or "plain" without one.
        is_sequential: the network is behind attention, of gptneox.
        has_markers: the tokenizer has tokens to fill in the middle.
        n_drafting_layers: layers that guess tokens ahead (MTP), of qwen35 and qwen35moe.
        is_fused: Q, K and V are one matrix.
        joins_experts: gate and up of experts are one matrix.
        dense_dim: width between the matrices that vectors go through; 0 for none.
        hidden_activation: name of that of the gates, of modern-bert; None for no key.
        n_high_cycles, n_low_cycles: of hrm_text, which has n_layers in each of its stacks.
        n_loops, skips_loop_norm: how often layers are gone through, and whether the residual stream
            is not normed in between, of nanbeige.
    """

    architecture: str = "llama"
    seed: int = 0
    tensor_type: str = "F32"
    embedding_type: str | None = None
    n_layers: int = 3
    model_dim: int = 256
    n_heads: PerLayer = 8
    n_kv_heads: PerLayer = 2
    head_dim: int = 32
    ffn_dim: PerLayer = 512
    n_conv_taps: int = 3
    n_delta_key_heads: int = 2
    n_delta_value_heads: int = 4
    delta_head_dim: int = 32
    n_ssd_heads: int = 8
    ssd_head_dim: int = 16
    n_ssd_groups: int = 2
    ssd_state_dim: int = 32
    has_ssm_norm: bool = True
    n_scan_channels: int | None = None
    has_scan_norms: bool = False
    scan_state_dim: int = 16
    scan_step_rank: int = 32
    wkv_head_dim: int = 16
    wkv_decay_rank: int = 32
    wkv_rate_rank: int = 64
    wkv_value_rank: int = 32
    wkv_gate_rank: int = 96
    wkv_shift_rank: int = 32
    rescale_every: int = 2
    n_wkv_kv_heads: int = 1
    has_wkv_biases: bool = True
    has_wkv_norms: bool = True
    n_dense_layers: int = 1
    n_experts: int = 6
    n_experts_used: int = 2
    n_adjugate_sharers: int = 2
    adjugate_ffn_dim: int = 32
    adjugate_scale: float = 0.4
    experts_step: int = 1
    temperature_length: int | None = None
    shared_ffn_dim: int | None = None
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    n_shared_experts: int = 1
    has_softmax_gate: bool = False
    kv_rank: int = 48
    q_rank: int = 40
    nope_dim: int = 16
    rope_dim: int = 16
    value_dim: int = 24
    sliding_kv_rank: int = 32
    sliding_nope_dim: int = 24
    sliding_value_dim: int = 16
    index_heads: int = 8
    index_key_dim: int = 32
    index_top_k: int = 24
    indexer_period: int = 1
    index_block_tokens: int = 4
    index_local_blocks: int = 1
    n_streams: int = 4
    stream_rank: int = 32
    ngram_tokens: int = 3
    ngram_heads: int = 2
    ngram_taps: int = 4
    ngram_layer: int = 0
    has_matrices_per_head: bool = True
    vocab_size: int = 320
    context_length: int = 2048
    pooling_type: int | None = None
    rank_labels: tuple[str, ...] = ()
    rank_tensors: tuple[str, ...] = ()
    has_unigram: bool = False
    adds_eos: bool = False
    norm_eps: float = 1e-5
    tied: bool = True
    biases: bool = False
    has_scales: bool = False
    has_two_norms: bool = False
    has_table: bool = False
    network: str = "apart"
    is_sequential: bool = False
    has_qk_norm: bool = True
    is_mixture: bool = False
    adapter_tokens: tuple[tuple[int, int], ...] = ((60, 61), (70, 71), (80, 80))
    adapter_rank: int = 4
    adapter_gain: float | None = None
    rope_pattern: tuple[bool, ...] | None = None
    is_fused: bool = False
    rotary_dim: int | None = None
    rotary_dim_sliding: int | None = None
    rotates: bool = False
    rope_base: float = 10000.0
    rope_scaling: str | None = None
    original_context: int | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    rope_base_sliding: float | None = None
    head_dim_sliding: int | None = None
    has_values_of_keys: bool = False
    expert_ffn_dim: int = 0
    n_shared_kv: int = 0
    token_input_dim: int = 0
    n_cut_layers: int | None = None
    has_markers: bool = False
    n_drafting_layers: int = 0
    n_high_cycles: int = 2
    n_low_cycles: int = 1
    n_loops: int = 1
    skips_loop_norm: bool = False
    joins_experts: bool = False
    dense_dim: int = 0
    hidden_activation: str | None = None

    @property
    def family(self) -> Family:
        family = FAMILIES.get(self.architecture) or ENCODERS[self.architecture]
        if self.is_mixture:
            return replace(family, has_experts=True, has_expert_width=False)
        if self.architecture == "mpt":
            family = replace(family, has_norm_biases=self.biases)
        if self.has_table:
            keys = {**family.keys, "attention.max_alibi_bias": 0.0}
            return replace(family, has_position_table=True, has_distance_bias=False, keys=keys)
        if self.network == "plain":
            return replace(family, is_ungated=True, has_network_biases=True)
        return replace(family, fused_gate_up=True) if self.network == "joined" else family

    @property
    def is_causal(self) -> bool:
        return self.architecture not in ENCODERS

    @property
    def n_stored_layers(self) -> int:
        """Layers whose weights are written, but for those that guess tokens ahead."""
        return self.n_layers * (2 if self.family.has_two_stacks else 1)

    @property
    def layers(self) -> list[tuple[int, ...]]:
        """LAYER_OPTIONS of every layer."""
        values = (getattr(self, name) for name in LAYER_OPTIONS)
        n_layers = self.n_stored_layers
        rows = [value if isinstance(value, tuple) else (value,) * n_layers for value in values]
        family = self.family
        by_turns = family.has_short_conv or family.has_mamba1 or family.mamba2 == "other"
        if by_turns and not isinstance(self.n_kv_heads, tuple):
            rows[1] = tuple(self.n_kv_heads * (layer % 2) for layer in range(self.n_layers))
        if family.has_selecting_mamba2:
            rows[0] = tuple(n * (kv > 0) for n, kv in zip(rows[0], rows[1], strict=True))
        if not family.attends:
            n_widths = len(rows) if family.has_only_mamba else 2
            rows[:n_widths] = [(0,) * self.n_layers] * n_widths
        if self.family.lacks_mixers and not isinstance(self.n_kv_heads, tuple):
            rows[:2] = (tuple(n * (layer != 1) for layer, n in enumerate(row)) for row in rows[:2])
        if self.family.mamba2 == "single" and not isinstance(self.n_kv_heads, tuple):
            # Mamba-2, attention and a feed-forward network by turns.
            rows[1] = tuple(self.n_kv_heads * (layer % 3 == 1) for layer in range(self.n_layers))
            rows[2] = tuple(n * (layer % 3 == 2) for layer, n in enumerate(rows[2]))
        return list(zip(*rows, strict=True))

    def mixer(self, layer: int) -> str:
        """As in ``LayerConfig``."""
        has_delta_net = self.family.has_delta_net or self.family.has_row_decays
        if has_delta_net and (layer + 1) % DELTA_NET_PERIOD:
            return "delta_net"
        _, n_kv_heads, ffn_dim = self.layers[layer]
        if n_kv_heads:
            return "attention_mamba2" if self.family.mamba2 == "beside" else "attention"
        if self.family.lacks_mixers:
            return "none"
        if self.family.is_rwkv:
            return "rwkv6" if self.family.has_rwkv6 else "rwkv7"
        if self.family.has_mamba1:
            return "mamba1"
        if self.family.mamba2 is None:
            return "short_conv"
        return "none" if self.family.mamba2 == "single" and ffn_dim else "mamba2"

    def has_experts(self, layer: int) -> bool:
        if self.family.mamba2 == "single":
            return self.family.has_experts and self.layers[layer][2] > 0
        if self.family.goes_by_turns:
            return self.n_experts > 0 and layer % 2 == 1
        if (layer + 1) % self.experts_step:
            return False
        return (self.family.has_experts and self.n_experts > 0) and (
            not self.family.begins_dense or layer >= self.n_dense_layers
        )

    def has_indexer(self, layer: int) -> bool:
        has_one = not (self.family.has_sliding_latent and self.pattern[layer])
        return self.family.is_indexed and has_one and layer % self.indexer_period == 0

    @property
    def pattern(self) -> list[bool]:
        """Which layers have a window, for families whose files say so layer by layer."""
        period = self.sliding_window_pattern or 3
        return [layer % period < period - 1 for layer in range(self.n_stored_layers)]

    @property
    def input_dim(self) -> int:
        """Width of every layer's input per token, which gemma3n always has."""
        return self.token_input_dim or GEMMA3N_INPUT_DIM * self.family.is_gemma3n

    @property
    def head_dims(self) -> list[int]:
        """The head size of every layer."""
        sliding = self.head_dim_sliding or self.head_dim
        return [sliding if has_window else self.head_dim for has_window in self.pattern]

    @property
    def head_value_dim(self) -> int:
        """Numbers of a head's values where attention is not of the latent kind."""
        return self.value_dim if self.family.has_other_values else self.head_dim

    @property
    def n_pairs(self) -> int:
        """Rotated pairs of a head."""
        if self.family.is_latent:
            return self.rope_dim // 2
        return (self.rotary_dim or self.head_dim) // 2

    def __post_init__(self) -> None:
        for name in (self.tensor_type, self.embedding_type or self.tensor_type):
            if name not in TENSOR_TYPES:
                raise ValueError(f"{name} is not one of {', '.join(TENSOR_TYPES)}")
        known = [*FAMILIES, *ENCODERS]
        if self.architecture not in known:
            raise ValueError(f"architecture is one of {', '.join(known)}")
        if self.rope_scaling not in (None, *ROPE_SCALINGS):
            raise ValueError(f"rope_scaling is None or one of {', '.join(ROPE_SCALINGS)}")
        for name in LAYER_OPTIONS:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.n_layers:
                raise ValueError(f"{name} is one number, or one for each of {self.n_layers} layers")
        if any(n_kv_heads and n_heads % n_kv_heads for n_heads, n_kv_heads, _ in self.layers):
            raise ValueError("n_heads must be a multiple of n_kv_heads")
        smallest = len(vocabulary()[0])
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size must be at least {smallest}")
